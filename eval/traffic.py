"""Traffic: the bytes that a decoding step reads, and the rate at which this machine's memory can be read."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from compress import architecture
from compress.eval.size import Size, bytes_read_per_token, kv_bytes_per_token
from compress.eval.speed import Workload, timed
from compress.eval.subject import Subject
from compress.kernels.cpu.build import Unavailable
from compress.kernels.cpu.library import Engine
from compress.runtime.config import ModelConfig
from compress.runtime.load import Model
from compress.runtime.native import NativeDecoder

logger = logging.getLogger(__name__)

# More than the caches of any processor hold.
READ_BYTES = 1 << 28
READS = 7
ROWS = 1 << 12


@dataclass(frozen=True)
class Traffic:
    """What a model's steps read. weights: bytes per step, whatever the batch. cache_item: bytes per cached value."""

    model: Model
    weights: int
    cache_item: float

    def per_step(self, workload: Workload) -> float:
        """Bytes of weights, keys and values that a decoding step of `workload` reads, averaged over its steps.

        Weights are read once for the whole batch; every sequence reads the keys and values of all tokens so far, or of
        as many as a layer's window shows.
        """
        config = self.model.config
        windows = config.windows if isinstance(config, ModelConfig) else (None,) * config.layer_count
        lengths = range(workload.prompt + 1, workload.prompt + workload.new + 1)
        tokens = sum(
            layers * sum(length if window is None else min(length, window) for length in lengths)
            for window, layers in Counter(windows).items()
        )
        kept = 2 * config.kv_heads * config.head_dim * self.cache_item
        return self.weights + workload.batch * kept * tokens / max(1, workload.new)


def traffic_of(model: Model, size: Size) -> Traffic:
    """The traffic of `model`, stored in `size`. Natively all weights lie packed as they are read; in torch, what is not
    packed, cache included, is in the type it computes in."""
    if isinstance(model.network, NativeDecoder):
        parts = [linear.prepared.tensors for linear in model.linears.values()]
        weights = sum(tensor.nbytes for tensors in parts for name, tensor in tensors.items() if name != "counts")
        itemsize, step = architecture.CACHE_BYTES[model.network.kv_cache]
        return Traffic(model, weights, itemsize + step / model.config.head_dim)
    itemsize = model.hidden(torch.zeros(1, 1, dtype=torch.int64)).element_size()
    return Traffic(model, bytes_read_per_token(size, itemsize), itemsize)


def cache_bytes(subject: Subject) -> int:
    """Bytes of key and value cache per token: as the native decoder keeps them, else in the checkpoint's dtype."""
    network = subject.model.network
    if isinstance(network, NativeDecoder):
        return network.kv_bytes_per_token()
    return kv_bytes_per_token(subject.stored.checkpoint, subject.model.config)


def threads_of(model: Model) -> int:
    """How many CPU threads `model` computes on."""
    return model.network.engine.threads if isinstance(model.network, NativeDecoder) else torch.get_num_threads()


def read_bandwidth(device: torch.device, threads: int) -> float:
    """Bytes per second at which a large buffer is read on `device`, by `threads` where that is the CPU: the median.

    Reading alone, since that is what decoding does. Without the native library, a product of a matrix and a vector,
    which writes next to nothing, on the threads that torch has.
    """
    buffer = torch.ones(READ_BYTES // torch.float32.itemsize, device=device)
    read = _reader(buffer, threads)
    read()
    return buffer.nbytes / median([timed(read, device) for _ in range(READS)])


def _reader(buffer: Tensor, threads: int) -> Callable[[], Any]:
    """What reads `buffer` once."""
    if buffer.device.type == "cpu":
        try:
            return partial(Engine(threads).read, buffer)
        except Unavailable as reason:
            logger.info("memory's bandwidth: measured through torch, since %s", reason)
    matrix = buffer.view(ROWS, -1)
    return partial(torch.mv, matrix, torch.ones(matrix.shape[1], device=buffer.device))
