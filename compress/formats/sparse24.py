"""2:4 sparsity at its true size: the two kept values of every four columns, and where they stood.

No other tool has a format for this that it still reads, so it is stored under our own `quant_method: lmpress`. Per
module, in place of `weight`: `weight_values`, the kept values in order: 4 bits as uint8 [N, K / 4], one byte per four
columns, the first value in its low half, 8 added; 8 bits as int8 [N, K / 2]; 16 bits as floats [N, K / 2].
`weight_indices` uint8 [N, ceil(K / 8)]: four bits per four columns, the position (0..3) of the first kept value in the
lower two, of the second in the upper two, and the earlier four columns in the low half of a byte. `weight_scale`
[N, G], but for floats. A kept value may be zero: what is pruned is told by the indices alone.

Bits per weight: 9 for floats, 5 for int8, 3 for int4, and the scales: one of 16 bits per group of columns, counted
before pruning.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.formats.grid import FLOAT_BITS, Grid, Quantized, TensorSpec
from compress.formats.pattern import Pattern, follows

NAME = "sparse24"
PATTERN = Pattern(2, 4)


def refuses(shape: tuple[int, int], grid: Grid) -> str | None:
    """The reason why a weight of `shape` [N, K] on `grid` cannot be stored, or None."""
    columns = shape[1]
    if grid.bits not in (4, 8, FLOAT_BITS):
        return f"{NAME} stores 4, 8 or 16 bits, not {grid.bits}"
    if not grid.symmetric:
        return f"{NAME} stores symmetric grids, on which what is pruned is 0: use a symmetric scheme"
    if columns % PATTERN.of:
        return f"{columns} input columns are not a multiple of {PATTERN.of}, so that no {PATTERN} mask fits"
    if grid.group_size is not None and (columns % grid.group_size or grid.group_size % PATTERN.of):
        return f"group size {grid.group_size} does not divide {columns} columns into groups of {PATTERN.of}"
    return None


def specs(shape: tuple[int, int], grid: Grid, scale_dtype: torch.dtype) -> dict[str, TensorSpec]:
    """The stored tensors of a weight of `shape` [N, K], by the suffix that follows the module's name."""
    rows, columns = shape
    values = {
        4: TensorSpec(torch.uint8, (rows, columns // 4)),
        8: TensorSpec(torch.int8, (rows, columns // 2)),
        FLOAT_BITS: TensorSpec(scale_dtype, (rows, columns // 2)),
    }
    stored = {
        "weight_values": values[grid.bits],
        "weight_indices": TensorSpec(torch.uint8, (rows, -(-columns // 8))),
    }
    if grid.bits != FLOAT_BITS:
        stored["weight_scale"] = TensorSpec(scale_dtype, (rows, grid.groups(columns)))
    return stored


def shape(stored: Mapping[str, tuple[int, ...]], grid: Grid) -> tuple[int, int]:
    """Rows and columns of the weight behind stored tensors of these shapes, by suffix."""
    rows, width = stored["weight_values"]
    return rows, width * (4 if grid.bits == 4 else 2)


def pack(quantized: Quantized, grid: Grid) -> dict[str, Tensor]:
    """The stored tensors of `quantized`; `unpack` gives it back exactly.

    Raises ValueError for a mask that does not keep two of every four columns, or a value where it keeps none.
    """
    mask, rows = quantized.mask, quantized.q.shape[0]
    if mask is None or not follows(mask, PATTERN):
        raise ValueError(f"{NAME} stores weights with a {PATTERN} mask, and this one has none: prune it first")
    if bool(quantized.q.masked_fill(mask, 0).any()):
        raise ValueError(f"{NAME}: a weight outside of its mask is not zero")
    values = quantized.q[mask].view(rows, -1)
    if grid.bits == 4:
        values = (values + 8).to(torch.uint8)
        values = values[:, 0::2] | values[:, 1::2] << 4
    stored = {"weight_values": values.contiguous(), "weight_indices": pack_indices(mask)}
    if grid.bits != FLOAT_BITS:
        stored["weight_scale"] = quantized.scale.contiguous()
    return stored


def unpack(tensors: dict[str, Tensor], grid: Grid) -> Quantized:
    """The values, scales and mask behind stored `tensors`.

    Raises ValueError for indices that are not ascending within their four columns.
    """
    values = tensors["weight_values"]
    if grid.bits == 4:
        values = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2).to(torch.int8) - 8
    rows, columns = values.shape[0], 2 * values.shape[1]
    positions = unpack_indices(tensors["weight_indices"], columns)
    q = torch.zeros(rows, columns // 4, 4, dtype=values.dtype, device=values.device)
    mask = torch.zeros_like(q, dtype=torch.bool)
    q.scatter_(-1, positions, values.view(rows, columns // 4, 2))
    mask.scatter_(-1, positions, True)
    scale = tensors.get("weight_scale")
    scale = torch.ones(rows, 1, device=values.device) if scale is None else scale
    return Quantized(q.flatten(-2), scale, mask=mask.flatten(-2))


def pack_indices(mask: Tensor) -> Tensor:
    """Where a 2:4 `mask` bool [N, K] keeps: uint8 [N, ceil(K / 8)]."""
    rows = len(mask)
    positions = (mask.nonzero()[:, 1] % PATTERN.of).to(torch.uint8).view(rows, -1, 2)
    codes = positions[..., 0] | positions[..., 1] << 2
    codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous()


def unpack_indices(indices: Tensor, columns: int) -> Tensor:
    """Positions int64 [N, K / 4, 2] of the kept values within their four columns.

    Raises ValueError where the second is not behind the first.
    """
    codes = torch.stack((indices & 15, indices >> 4), dim=-1).flatten(-2)[:, : columns // PATTERN.of]
    positions = torch.stack((codes & 3, codes >> 2), dim=-1).long()
    if not bool((positions[..., 0] < positions[..., 1]).all()):
        raise ValueError(f"{NAME}: indices do not ascend within their four columns")
    return positions
