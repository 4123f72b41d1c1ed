"""Formats: which bytes a weight on a grid becomes. One file each, exact round trips, no algorithm inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from compress.errors import InputError, did_you_mean
from compress.formats import int8_outlier, int_quantized, pack_quantized, sparse24
from compress.formats.grid import Grid, Quantized, TensorSpec


class Format(Protocol):
    """What a format module offers. Keys of the dictionaries are suffixes that follow the module's name."""

    NAME: str

    def refuses(self, shape: tuple[int, int], grid: Grid) -> str | None: ...

    def specs(self, shape: tuple[int, int], grid: Grid, scale_dtype: torch.dtype) -> dict[str, TensorSpec]: ...

    def shape(self, stored: Mapping[str, tuple[int, ...]], grid: Grid) -> tuple[int, int]: ...

    def pack(self, quantized: Quantized, grid: Grid) -> dict[str, Tensor]: ...

    def unpack(self, tensors: dict[str, Tensor], grid: Grid) -> Quantized: ...


FORMATS: dict[str, Format] = {
    pack_quantized.NAME: pack_quantized,
    int_quantized.NAME: int_quantized,
    int8_outlier.NAME: int8_outlier,
    sparse24.NAME: sparse24,
}


def format_named(name: str) -> Format:
    """The format module called `name`; InputError with the nearest known name otherwise."""
    if name not in FORMATS:
        raise InputError(f"format: {name!r} is not known{did_you_mean(name, FORMATS)}")
    return FORMATS[name]
