"""Load a checkpoint folder into a model that runs: the decoder where it knows the family, transformers otherwise."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from compress.architecture import Dimensions
from compress.checkpoint import Checkpoint, manifest, open_checkpoint
from compress.checkpoint.quantization_config import stored_schemes
from compress.errors import USAGE, InputError
from compress.formats.scheme import Scheme
from compress.kernels import Kernel, reference_int8
from compress.kernels.build import trusted_library
from compress.kernels.cpu.build import Unavailable
from compress.kernels.cpu.build import choose as cpu_variant
from compress.kernels.cpu.kernel import CpuKernel
from compress.kernels.cpu.library import Engine
from compress.kernels.cuda import CudaKernel
from compress.kernels.exported import has_kernels
from compress.kernels.pick import KERNELS, cpu_kernel
from compress.runtime import native as native_decoder
from compress.runtime import transformers_engine
from compress.runtime.assign import PackedLinear, Target, assign, schemes_of
from compress.runtime.config import ModelConfig, Unsupported, read_config
from compress.runtime.decoder import Decoder
from compress.runtime.native import NativeDecoder
from compress.runtime.panel_cache import CACHE_TYPES

logger = logging.getLogger(__name__)


class Network(Protocol):
    """What an engine builds, whichever it is."""

    def hidden(self, tokens: Tensor, cache: Any = None) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def new_cache(self, batch: int, capacity: int) -> Any: ...


@dataclass(frozen=True)
class Model:
    """A loaded model. `engine` is "lmpress" or "transformers"; `notes` say what a report must not leave out.

    linears: its linear layers whose weight stays packed, by module name. fallbacks: {"name", "reason"} of what was
    asked to run natively and does not.
    """

    folder: Path
    config: ModelConfig | Dimensions
    engine: str
    network: Network
    device: torch.device
    linears: dict[str, PackedLinear] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    fallbacks: list[dict[str, str]] = field(default_factory=list)

    @property
    def kernels(self) -> dict[str, str]:
        """The kernel that multiplies each packed linear layer, by module name."""
        return {name: linear.kernel.NAME for name, linear in self.linears.items()}

    @torch.inference_mode()
    def hidden(self, tokens: Tensor, cache: Any = None) -> Tensor:
        """Hidden states [B, T, D] after the last norm for tokens [B, T], which continue `cache` and extend it.

        Raises InputError for an id that the embedding has no row for.
        """
        tokens = tokens.to(self.device)
        if tokens.numel():
            lowest, highest = (int(bound) for bound in torch.aminmax(tokens))
            if lowest < 0 or highest >= self.config.vocab_size:
                raise InputError(
                    f"{self.folder}: token id {lowest if lowest < 0 else highest} is beyond the embedding, which has "
                    f"{self.config.vocab_size} rows: use the tokenizer that belongs to this checkpoint"
                )
        return self.network.hidden(tokens, cache)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] of hidden states [..., D]: a vocabulary wide, so ask for a few rows at a time."""
        return self.network.logits(hidden)

    def new_cache(self, batch: int, capacity: int) -> Any:
        """An empty key and value cache for `batch` sequences of at most `capacity` tokens."""
        return self.network.new_cache(batch, capacity)

    def outlier_misses(self) -> dict[str, tuple[int, int]]:
        """Per layer with outlier columns: activations over the threshold outside them, and activations seen so far."""
        counts = {name: linear.kernel.outlier_counts(linear.prepared) for name, linear in self.linears.items()}
        return {name: count for name, count in counts.items() if count is not None}


@dataclass(frozen=True)
class Execution:
    """How a model is run. kernels: "auto" (the fastest there are), or plain torch: "reference", or "reference-int8",
    which rounds activations as the CPU kernel does.

    kv_cache: "f32", "bf16" or "int8", by default what the checkpoint's recipe says; threads: of the native kernels, by
    default all that the process may use. trust_kernels: run kernels of the checkpoint that were built elsewhere: on a
    GPU, and on the CPU where there is no compiler.
    """

    kernels: str = "auto"
    kv_cache: str | None = None
    threads: int | None = None
    trust_kernels: bool = False


DEFAULT = Execution()


def known_config(checkpoint: Checkpoint) -> ModelConfig | Unsupported:
    """What the decoder needs to know of the model, or why it cannot run it."""
    try:
        return read_config(checkpoint.config, checkpoint.folder / "config.json")
    except Unsupported as reason:
        return reason


def load_model(
    folder: Path | Checkpoint,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    execution: Execution = DEFAULT,
) -> Model:
    """Load the checkpoint in `folder` (or opened already), quantized or not, to compute in `dtype` on `device`.

    Packed weights stay packed. Raises InputError for a checkpoint that is damaged, not understood or not complete.
    """
    checkpoint = folder if isinstance(folder, Checkpoint) else open_checkpoint(Path(folder))
    kv_cache = execution.kv_cache or _checked_cache_type(checkpoint)
    device = torch.device(device)
    best, fallbacks = _fastest(execution, checkpoint.folder, device, dtype)
    plain = (reference_int8,) if execution.kernels == reference_int8.NAME else KERNELS
    target = Target(device, dtype, (best, *plain) if best else plain)
    fallbacks += _refusals(best, stored_schemes(checkpoint).values(), device)
    config = known_config(checkpoint)
    notes = []
    network: Network
    shape: ModelConfig | Dimensions
    if isinstance(config, Unsupported):
        notes = [f"runs through transformers, not the bundled decoder: {config}"]
        logger.warning("%s: %s", checkpoint.folder, notes[0])
        engine = "transformers"
        network, shape = transformers_engine.build(checkpoint, target)
        linears = _packed(network)
    else:
        engine, shape = "lmpress", config
        network = decoder = _decoder(checkpoint, config, target)
        if isinstance(best, CpuKernel):
            reason = native_decoder.refuses(decoder)
            if reason is None:
                network = NativeDecoder(decoder, best, kv_cache)
            else:
                fallbacks.append({"name": "native decoder", "reason": reason})
        linears = _packed(decoder)
    if kv_cache != "f32" and not isinstance(network, NativeDecoder):
        needs = f"{kv_cache!r} needs the native decoder on the CPU in float32"
        if execution.kv_cache is not None:
            raise InputError(f"kv_cache: {needs}: use 'f32'", USAGE)
        fallbacks.append({"name": "kv_cache", "reason": f"{needs}: kept in the dtype that the model computes in"})
    for told in fallbacks:
        logger.warning("%s: %s: %s: runs on torch operations, slower", checkpoint.folder, told["name"], told["reason"])
    return Model(checkpoint.folder, shape, engine, network, device, linears, notes, fallbacks)


def _decoder(checkpoint: Checkpoint, config: ModelConfig, target: Target) -> Decoder:
    """The bundled decoder with the checkpoint's weights in it."""
    with torch.device("meta"):
        decoder = Decoder(config)
    assign(decoder, checkpoint, schemes_of(checkpoint, decoder), target)
    return decoder.eval()


def _checked_cache_type(checkpoint: Checkpoint) -> str:
    """The cache type that the checkpoint's recipe asks for, once its manifest has been found to fit it."""
    if not (checkpoint.folder / manifest.NAME).exists():
        return "f32"
    told = manifest.read(checkpoint.folder)
    manifest.check(told, checkpoint)
    kv_cache = told.recipe.get("export", {}).get("kv_cache", "f32")
    if kv_cache not in CACHE_TYPES:
        file = checkpoint.folder / manifest.NAME
        raise InputError(f"{file}: field 'recipe.export.kv_cache' is {kv_cache!r}: compress the model again")
    return kv_cache


def _fastest(
    execution: Execution, folder: Path, device: torch.device, dtype: torch.dtype
) -> tuple[Kernel | None, list[dict[str, str]]]:
    """The fastest kernel that may be tried, None where plain torch was asked for; and why there is none, as fallbacks.

    Raises InputError where the checkpoint's own CPU library was to be trusted and cannot be run.
    """
    if execution.kernels != "auto":
        return None, []
    if device.type == "cuda":
        return CudaKernel(dtype, folder, execution.trust_kernels), []
    if device.type != "cpu" or dtype != torch.float32:
        return None, []
    try:
        variant = cpu_variant()
        try:
            return cpu_kernel(execution.threads), []
        except Unavailable:
            if not (execution.trust_kernels and has_kernels(folder)):
                raise
        return CpuKernel(Engine(execution.threads, trusted_library(folder, variant))), []
    except Unavailable as reason:
        return None, [{"name": "native kernels", "reason": str(reason)}]


def _refusals(best: Kernel | None, schemes: Iterable[Scheme], device: torch.device) -> list[dict[str, str]]:
    """Why the fastest kernel, where there is one, leaves layers to a slower one: a fallback for each reason."""
    reasons = [best.refuses(scheme, device) for scheme in schemes] if best else []
    return [{"name": f"{best.NAME} kernels", "reason": reason} for reason in dict.fromkeys(reasons) if best and reason]


def _packed(network: nn.Module) -> dict[str, PackedLinear]:
    return {name: module for name, module in network.named_modules() if isinstance(module, PackedLinear)}
