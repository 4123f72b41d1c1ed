"""What a run compresses: a float checkpoint as it is, or a quantized one read as the float weights it stands for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.checkpoint.disk import opened, read_chunks
from compress.checkpoint.header import TensorInfo
from compress.checkpoint.quantization_config import stored_shape
from compress.checkpoint.reader import Checkpoint
from compress.errors import InputError
from compress.formats import format_named
from compress.formats.grid import dequantize
from compress.formats.scheme import Scheme

SAMPLE = 1 << 12


class Source(Protocol):
    """Float tensors by name, read one at a time."""

    @property
    def folder(self) -> Any: ...

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def stored(self) -> Mapping[str, TensorInfo]:
        """The tensors as they lie on the disk."""
        ...

    def read(self, name: str) -> Tensor: ...

    def read_rows(self, name: str, start: int, stop: int) -> Tensor: ...


@dataclass(frozen=True)
class Dequantized:
    """A quantized checkpoint seen as a float one: `<module>.weight` [N, K] in `dtype` stands for the packed tensors."""

    checkpoint: Checkpoint
    schemes: dict[str, Scheme]
    dtype: torch.dtype
    tensors: dict[str, TensorInfo]

    @property
    def folder(self) -> Any:
        return self.checkpoint.folder

    @property
    def config(self) -> dict[str, Any]:
        return {key: value for key, value in self.checkpoint.config.items() if key != "quantization_config"}

    @property
    def stored(self) -> Mapping[str, TensorInfo]:
        return self.checkpoint.tensors

    def read(self, name: str) -> Tensor:
        """The float tensor `name`, dequantized where it is stored packed."""
        module = name.removesuffix(".weight")
        if not self._is_packed(name):
            return self.checkpoint.read(name)
        scheme = self.schemes[module]
        parts = {suffix: self.checkpoint.read(f"{module}.{suffix}") for suffix in _parts(self.checkpoint, module)}
        return dequantize(format_named(scheme.format).unpack(parts, scheme.grid)).to(self.dtype)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` (exclusive) of the float tensor `name`; a packed one is dequantized as a whole."""
        if self._is_packed(name):
            return self.read(name)[start:stop]
        return self.checkpoint.read_rows(name, start, stop)

    def _is_packed(self, name: str) -> bool:
        return name.endswith(".weight") and name.removesuffix(".weight") in self.schemes


def dequantized(checkpoint: Checkpoint, schemes: dict[str, Scheme], dtype: torch.dtype) -> Dequantized:
    """See `checkpoint`, whose modules are stored under `schemes`, as float tensors in `dtype`."""
    packed = {f"{module}.{suffix}" for module in schemes for suffix in _parts(checkpoint, module)}
    tensors = {name: info for name, info in checkpoint.tensors.items() if name not in packed}
    for module, scheme in schemes.items():
        first = checkpoint.tensors[f"{module}.{_parts(checkpoint, module)[0]}"]
        rows, columns = stored_shape(checkpoint, module, scheme)
        name = f"{module}.weight"
        tensors[name] = TensorInfo(name, first.file, dtype, (rows, columns), 0, rows * columns * dtype.itemsize)
    return Dequantized(checkpoint, schemes, dtype, tensors)


def dominant_dtype(tensors: Mapping[str, TensorInfo]) -> torch.dtype:
    """The floating-point dtype that holds most bytes. Raises InputError where no tensor is floating-point."""
    totals: dict[torch.dtype, int] = {}
    for info in tensors.values():
        if info.dtype.is_floating_point:
            totals[info.dtype] = totals.get(info.dtype, 0) + info.nbytes
    if not totals:
        file = next(iter(tensors.values())).file
        raise InputError(f"{file}: holds no floating-point tensor: give the folder of a language model")
    return max(totals, key=lambda dtype: totals[dtype])


def _parts(checkpoint: Checkpoint, module: str) -> list[str]:
    prefix = module + "."
    return [name[len(prefix) :] for name in checkpoint.tensors if name.startswith(prefix) and name != f"{prefix}bias"]


def identity(source: Source) -> str:
    """A hash of the source's config and, of each stored tensor, its name, dtype, shape and 4 KiB from both of its ends.

    Reading all of it would cost a pass over the model before the work has begun.
    """
    digest = hashlib.sha256(json.dumps(source.config, sort_keys=True).encode())
    for name, info in sorted(source.stored.items()):
        digest.update(f"{name} {info.dtype} {info.shape}".encode())
        with opened(info.file) as descriptor:
            for start in (info.offset, info.offset + max(0, info.nbytes - SAMPLE)):
                for chunk in read_chunks(descriptor, start, min(SAMPLE, info.nbytes)):
                    digest.update(chunk)
    return digest.hexdigest()
