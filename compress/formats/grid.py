"""Integer grids and the values that sit on them: what every algorithm produces and every format stores."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

# Of a "grid" that is none: floats of 16 bits, stored as they are under a scale of 1.
FLOAT_BITS = 16


@dataclass(frozen=True)
class Grid:
    """Signed integers of `bits` bits with one scale per `group_size` input columns (None: one per output row).

    FLOAT_BITS stands for floats, which are their own integers.
    """

    bits: int
    symmetric: bool = True
    group_size: int | None = None

    @property
    def minimum(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def maximum(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def groups(self, columns: int) -> int:
        """Scales per row of a weight with `columns` input columns."""
        return 1 if self.group_size is None else columns // self.group_size


@dataclass(frozen=True)
class Quantized:
    """A weight [N, K] on a grid: w = (q - zero) * scale, with G groups of K // G columns each.

    q: int8 [N, K], or 16-bit floats. scale: [N, G] in the dtype it is stored in. zero: int8 [N, G], or None when
    symmetric. outlier_columns: int32 [n], ascending, and outlier_weight: 16-bit [N, n]: columns off the grid (q is 0
    there). mask: bool [N, K], what pruning has kept (q is 0 elsewhere), or None for a weight that was not pruned.
    """

    q: Tensor
    scale: Tensor
    zero: Tensor | None = None
    outlier_columns: Tensor | None = None
    outlier_weight: Tensor | None = None
    mask: Tensor | None = None


def dequantize(quantized: Quantized) -> Tensor:
    """The float32 weight [N, K] that `quantized` stands for."""
    rows, columns = quantized.q.shape
    groups = quantized.scale.shape[1]
    # Every step below owns its result, so that one copy of the weight is alive at a time.
    weight = quantized.q.to(torch.float32).view(rows, groups, columns // groups)
    if quantized.zero is not None:
        weight.sub_(quantized.zero.unsqueeze(-1).to(torch.float32))
    weight = weight.mul_(quantized.scale.unsqueeze(-1).to(torch.float32)).view(rows, columns)
    if quantized.outlier_columns is not None and quantized.outlier_weight is not None:
        weight[:, quantized.outlier_columns.long()] = quantized.outlier_weight.to(torch.float32)
    return weight


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of a stored tensor, known before any weight is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize
