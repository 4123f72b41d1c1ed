"""int8 rows with a few input columns kept in 16 bit: LLM.int8() (arXiv 2208.07339, section 3.2) with static columns.

compressed-tensors has no words for this, so it is stored under our own `quant_method: lmpress`. Per module: `weight`
int8 [N, K], zero in the outlier columns; `weight_scale` [N, 1]; `outlier_columns` int32 [n], ascending;
`outlier_weight` [N, n] in the dtype of the scales.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.formats import int_quantized
from compress.formats.grid import Grid, Quantized, TensorSpec

NAME = "int8-outlier"


def refuses(shape: tuple[int, int], grid: Grid) -> str | None:
    """The reason why a weight of `shape` [N, K] on `grid` cannot be stored, or None."""
    return int_quantized.refuses(shape, grid)


def specs(shape: tuple[int, int], grid: Grid, scale_dtype: torch.dtype, outliers: int = 0) -> dict[str, TensorSpec]:
    """The stored tensors of a weight of `shape` [N, K] with `outliers` columns, a number known after calibration."""
    return {
        **int_quantized.specs(shape, grid, scale_dtype),
        "outlier_columns": TensorSpec(torch.int32, (outliers,)),
        "outlier_weight": TensorSpec(scale_dtype, (shape[0], outliers)),
    }


def shape(stored: Mapping[str, tuple[int, ...]], grid: Grid) -> tuple[int, int]:
    """Rows and columns of the weight behind stored tensors of these shapes, by suffix."""
    return int_quantized.shape(stored, grid)


def pack(quantized: Quantized, grid: Grid) -> dict[str, Tensor]:
    """The stored tensors of `quantized`; `unpack` gives it back exactly."""
    if quantized.outlier_columns is None or quantized.outlier_weight is None:
        raise ValueError(f"{NAME} stores outlier columns, and this weight has none: use {int_quantized.NAME}")
    return {
        **int_quantized.pack(quantized, grid),
        "outlier_columns": quantized.outlier_columns.contiguous(),
        "outlier_weight": quantized.outlier_weight.contiguous(),
    }


def unpack(tensors: dict[str, Tensor], grid: Grid) -> Quantized:
    """The integers, scales and outlier columns behind stored `tensors`."""
    return Quantized(
        q=tensors["weight"],
        scale=tensors["weight_scale"],
        outlier_columns=tensors["outlier_columns"],
        outlier_weight=tensors["outlier_weight"],
    )
