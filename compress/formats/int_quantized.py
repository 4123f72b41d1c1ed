"""compressed-tensors `int-quantized`: int8 weights with one scale per output row (W8A8).

Per module: `weight` int8 [N, K] and `weight_scale` [N, 1]. Activations are quantized per token when the model runs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.formats.grid import Grid, Quantized, TensorSpec

NAME = "int-quantized"


def refuses(shape: tuple[int, int], grid: Grid) -> str | None:
    """The reason why a weight of `shape` [N, K] on `grid` cannot be stored, or None."""
    if grid.bits != 8 or not grid.symmetric or grid.group_size is not None:
        return f"{NAME} stores symmetric 8-bit integers with one scale per row"
    return None


def specs(shape: tuple[int, int], grid: Grid, scale_dtype: torch.dtype) -> dict[str, TensorSpec]:
    """The stored tensors of a weight of `shape` [N, K], by the suffix that follows the module's name."""
    return {"weight": TensorSpec(torch.int8, tuple(shape)), "weight_scale": TensorSpec(scale_dtype, (shape[0], 1))}


def shape(stored: Mapping[str, tuple[int, ...]], grid: Grid) -> tuple[int, int]:
    """Rows and columns of the weight behind stored tensors of these shapes, by suffix."""
    rows, columns = stored["weight"]
    return rows, columns


def pack(quantized: Quantized, grid: Grid) -> dict[str, Tensor]:
    """The stored tensors of `quantized`; `unpack` gives it back exactly."""
    return {"weight": quantized.q.contiguous(), "weight_scale": quantized.scale.contiguous()}


def unpack(tensors: dict[str, Tensor], grid: Grid) -> Quantized:
    """The integers and scales behind stored `tensors`."""
    return Quantized(q=tensors["weight"], scale=tensors["weight_scale"])
