"""compressed-tensors `pack-quantized`: 4- or 8-bit integers packed into int32 words along the input columns.

Per module, in place of `weight`: `weight_packed` int32 [N, K * bits / 32], `weight_scale` [N, G], `weight_shape`
int64 [2] = [N, K], and for asymmetric grids `weight_zero_point` int32 [N * bits / 32, G], packed along the rows.
Stored value u = q + 2^(bits - 1); element j of a row sits at bit j * bits of the row's little-endian bit stream.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.formats.grid import Grid, Quantized, TensorSpec

NAME = "pack-quantized"
WORD = 32


def refuses(shape: tuple[int, int], grid: Grid) -> str | None:
    """The reason why a weight of `shape` [N, K] on `grid` cannot be stored, or None."""
    rows, columns = shape
    if grid.bits not in (4, 8):
        return f"{NAME} stores 4 or 8 bits, not {grid.bits}"
    if grid.group_size is not None and columns % grid.group_size:
        return f"{columns} input columns are not a multiple of group size {grid.group_size}"
    per_word = WORD // grid.bits
    if columns % per_word:
        return f"{columns} input columns do not fill int32 words of {per_word} values"
    if not grid.symmetric and rows % per_word:
        return f"{rows} output rows do not fill int32 words of {per_word} zero points"
    return None


def specs(shape: tuple[int, int], grid: Grid, scale_dtype: torch.dtype) -> dict[str, TensorSpec]:
    """The stored tensors of a weight of `shape` [N, K], by the suffix that follows the module's name."""
    rows, columns = shape
    groups = grid.groups(columns)
    stored = {
        "weight_packed": TensorSpec(torch.int32, (rows, columns * grid.bits // WORD)),
        "weight_scale": TensorSpec(scale_dtype, (rows, groups)),
        "weight_shape": TensorSpec(torch.int64, (2,)),
    }
    if not grid.symmetric:
        stored["weight_zero_point"] = TensorSpec(torch.int32, (rows * grid.bits // WORD, groups))
    return stored


def shape(stored: Mapping[str, tuple[int, ...]], grid: Grid) -> tuple[int, int]:
    """Rows and columns of the weight behind stored tensors of these shapes, by suffix."""
    rows, words = stored["weight_packed"]
    return rows, words * WORD // grid.bits


def pack(quantized: Quantized, grid: Grid) -> dict[str, Tensor]:
    """The stored tensors of `quantized`; `unpack` gives it back exactly."""
    stored = {
        "weight_packed": pack_words(quantized.q, grid.bits),
        "weight_scale": quantized.scale.contiguous(),
        "weight_shape": torch.tensor(quantized.q.shape, dtype=torch.int64),
    }
    if quantized.zero is not None:
        stored["weight_zero_point"] = pack_words(quantized.zero.T, grid.bits).T.contiguous()
    return stored


def unpack(tensors: dict[str, Tensor], grid: Grid) -> Quantized:
    """The integers, scales and zero points behind stored `tensors`."""
    return Quantized(
        q=unpack_words(tensors["weight_packed"], grid.bits),
        scale=tensors["weight_scale"],
        zero=unpack_zero(tensors, grid),
    )


def unpack_zero(tensors: dict[str, Tensor], grid: Grid) -> Tensor | None:
    """The zero points int8 [N, G] behind stored `tensors`, or None when symmetric."""
    zero = tensors.get("weight_zero_point")
    return None if zero is None else unpack_words(zero.T, grid.bits).T.contiguous()


def pack_words(values: Tensor, bits: int) -> Tensor:
    """Signed int8 [R, C] -> int32 [R, C * bits / 32], lowest bits first."""
    bytes_ = (values.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    if bits == 4:
        bytes_ = bytes_[:, 0::2] | (bytes_[:, 1::2] << 4)
    # A little-endian host sees four bytes as one int32 word, which is the layout on disk.
    # Flattened, because a dimension of size one (one group's zero points, turned) may have any stride.
    return bytes_.contiguous().flatten().view(torch.int32).view(bytes_.shape[0], bytes_.shape[1] // 4)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [R, C * bits / 32] -> signed int8 [R, C]: the inverse of `pack_words`."""
    bytes_ = words.contiguous().flatten().view(torch.uint8).view(words.shape[0], words.shape[1] * 4)
    if bits == 4:
        bytes_ = torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(-2)
    return (bytes_.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
