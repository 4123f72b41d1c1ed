"""Size of a checkpoint: bytes on disk, stored bits per weight, and key-value cache per token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from compress import architecture
from compress.architecture import CacheSizes
from compress.checkpoint import Checkpoint, TensorInfo
from compress.checkpoint.source import dominant_dtype
from compress.eval.tables import layer_kind
from compress.formats import format_named
from compress.formats.scheme import Scheme
from compress.runtime.config import Unsupported, read_config


@dataclass(frozen=True)
class ModuleSize:
    """A tensor, or all tensors of a compressed layer: `weights` elements in `nbytes`. scheme: None if uncompressed."""

    name: str
    scheme: Scheme | None
    weights: int
    nbytes: int


@dataclass(frozen=True)
class Size:
    """file_bytes: of the shard files, headers included. modules: all that they store, in order; ties count once."""

    file_bytes: int
    modules: tuple[ModuleSize, ...]

    @property
    def compressed(self) -> tuple[ModuleSize, ...]:
        return tuple(module for module in self.modules if module.scheme is not None)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits, scales and outlier columns included, per weight of the compressed layers; of all if none is."""
        return bits_per_weight(self.compressed or self.modules)

    @property
    def bits_per_weight_all(self) -> float:
        """Stored bits per parameter of the whole model, embeddings and norms included."""
        return bits_per_weight(self.modules)


def bits_per_weight(modules: tuple[ModuleSize, ...]) -> float:
    return 8 * sum(module.nbytes for module in modules) / max(1, sum(module.weights for module in modules))


def measure_size(checkpoint: Checkpoint, schemes: Mapping[str, Scheme]) -> Size:
    """The size of `checkpoint`, whose compressed layers have `schemes` (module -> scheme). Reads no weight."""
    parts: dict[str, list[TensorInfo]] = defaultdict(list)
    for name, info in checkpoint.tensors.items():
        module, _, suffix = name.rpartition(".")
        # A bias is no part of the compressed weight: it counts under its own name.
        parts[module if module in schemes and suffix != "bias" else name].append(info)
    files = {info.file for info in checkpoint.tensors.values()}
    modules = tuple(_module_size(name, infos, schemes.get(name)) for name, infos in parts.items())
    return Size(sum(file.stat().st_size for file in files), modules)


def _module_size(name: str, infos: list[TensorInfo], scheme: Scheme | None) -> ModuleSize:
    # What stands for the weight itself; scales, zero points and outlier columns add bytes but no weights.
    stored = {info.name.rpartition(".")[2]: info.shape for info in infos}
    shape = infos[0].shape if scheme is None else format_named(scheme.format).shape(stored, scheme.grid)
    return ModuleSize(name, scheme, prod(shape), sum(info.nbytes for info in infos))


def kv_bytes_per_token(checkpoint: Checkpoint, sizes: CacheSizes) -> int:
    """Bytes of key-value cache per token, in the dtype that most of the checkpoint's floating-point data is in."""
    return architecture.kv_bytes_per_token(sizes, dominant_dtype(checkpoint.tensors).itemsize)


def kv_bytes_of(checkpoint: Checkpoint) -> int | None:
    """`kv_bytes_per_token` from config.json alone; None for an architecture that only transformers can size."""
    try:
        return kv_bytes_per_token(checkpoint, read_config(checkpoint.config, checkpoint.folder / "config.json"))
    except Unsupported:
        return None


def bytes_read_per_token(size: Size, itemsize: int) -> int:
    """Bytes of weights that one decoded token reads at least: compressed layers as stored, all others in run dtype.

    `itemsize` is the run dtype's. Where there is an output head of its own, the input embedding gives one row only, and
    is left out.
    """
    tables = vocabulary_tables(size)
    idle = next((table for table in tables if table.scheme is None), None) if len(tables) > 1 else None
    read = [module for module in size.modules if module is not idle]
    return sum(module.nbytes if module.scheme else module.weights * itemsize for module in read)


def vocabulary_tables(size: Size) -> list[ModuleSize]:
    """The input embedding and, where one is stored, the output layer, whatever they are called.

    They are the largest of what lies outside the blocks, and have one shape. Where only one of the two is compressed,
    it is the output layer: embeddings never are.
    """
    outside = [module for module in size.modules if layer_kind(module.name)[1] == module.name]
    most = max((module.weights for module in outside), default=0)
    return [module for module in outside if module.weights == most]
