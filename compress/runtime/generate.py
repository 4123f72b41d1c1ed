"""Generation: greedy or sampled, one prompt or a batch of free-running sequences, reproducible by seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compress.architecture import SAMPLING_CACHE_BYTES, kv_bytes_per_token
from compress.checkpoint.strict_json import read_object
from compress.errors import USAGE, InputError
from compress.runtime.load import Model

MAX_BATCH = 64


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Temperature 0 is greedy; top_k 0 and top_p 1 (arXiv 1904.09751) are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            "temperature": (self.temperature, self.temperature >= 0, "0 (greedy) or more"),
            "top_k": (self.top_k, self.top_k >= 0, "0 (off) or more"),
            "top_p": (self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
        }
        for name, (value, right, mend) in checks.items():
            if not right:
                raise InputError(f"sampling: {name} is {value}: give {mend}", USAGE)


def generate(
    model: Model, prompt: list[int], max_new: int, sampling: Sampling, stop: frozenset[int] = frozenset()
) -> Iterator[int]:
    """Continue `prompt` by at most `max_new` tokens, one by one; a token in `stop` ends it and is not yielded."""
    if not prompt:
        raise InputError("prompt: has no tokens: give some text", USAGE)
    cache = model.new_cache(1, len(prompt) + max_new)
    uniform = _uniform(1, max_new, sampling.seed)
    tokens = torch.tensor([prompt])
    for step in range(max_new):
        tokens = choose(model.logits(model.hidden(tokens, cache)[:, -1]), sampling, uniform[:, step])[:, None]
        token = int(tokens)
        if token in stop:
            return
        yield token


def sample_sequences(
    model: Model, start: int, count: int, length: int, seed: int, progress: Callable[[int, int], None] | None = None
) -> Tensor:
    """`count` sequences of `length` tokens that the model writes by itself at temperature 1: see write_sequences."""
    return write_sequences(model, start, (count, length), Sampling(1.0, seed=seed), progress)


def write_sequences(
    model: Model,
    start: int,
    shape: tuple[int, int],
    sampling: Sampling,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Sequences the model writes by itself: int64 of `shape` (count, length), each beginning with `start`.

    They are drawn side by side, as many as SAMPLING_CACHE_BYTES of keys and values allow. `progress` is told after
    every step how many tokens are done and how many there will be.
    """
    count, length = shape
    config = model.config
    sequence_bytes = kv_bytes_per_token(config, torch.float32.itemsize) * length
    batch = max(1, min(MAX_BATCH, SAMPLING_CACHE_BYTES // sequence_bytes))
    uniform = _uniform(count, length, sampling.seed)
    sequences = torch.full((count, length), start, dtype=torch.int64)
    for first in range(0, count, batch):
        rows = slice(first, min(first + batch, count))
        cache = model.new_cache(rows.stop - rows.start, length)
        for step in range(1, length):
            hidden = model.hidden(sequences[rows, step - 1 : step], cache)
            sequences[rows, step] = choose(model.logits(hidden[:, -1]), sampling, uniform[rows, step])
            if progress is not None:
                progress(first * length + (rows.stop - rows.start) * (step + 1), count * length)
    return sequences


def choose(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """The next token [B] for logits [B, V]: the point `uniform` [B] of the way up the cumulated probabilities.

    One given number decides per sequence, so what is drawn does not depend on the batch it is drawn in.
    """
    if sampling.temperature == 0:
        return logits.argmax(dim=-1).cpu()
    logits = logits.float().cpu() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = logits.softmax(dim=-1)
    if sampling.top_p < 1:
        descending, order = probabilities.sort(dim=-1, descending=True)
        # A token stays if those before it do not reach top_p: the most likely one always does.
        outside = descending.cumsum(dim=-1) - descending >= sampling.top_p
        probabilities = probabilities.scatter(-1, order, descending.masked_fill(outside, 0))
    cumulated = probabilities.cumsum(dim=-1, dtype=torch.float64)
    point = uniform[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, point, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)


def stop_tokens(folder: Path) -> frozenset[int]:
    """The ids that end a text: `eos_token_id` of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if file.exists():
            ids = read_object(file).get("eos_token_id")
            if ids is not None:
                return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def start_token(folder: Path) -> int:
    """The id with which a text begins: `bos_token_id` of config.json, else its (first) `eos_token_id`.

    Raises InputError where there is neither.
    """
    config = read_object(folder / "config.json")
    start = config.get("bos_token_id")
    start = config.get("eos_token_id") if start is None else start
    start = start[0] if isinstance(start, list) and start else start
    if not isinstance(start, int):
        raise InputError(
            f"{folder / 'config.json'}: has neither bos_token_id nor eos_token_id with which the model could begin a "
            "text of its own: name a text as the source"
        )
    return start


def _uniform(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, columns, generator=generator, dtype=torch.float64)
