"""One warp's `mma.sp`, emulated thread by thread from the tables of the PTX ISA: what layouts are checked against.

Sections "Sparse matrix storage" and "Matrix fragments for multiply-accumulate operation with sparse matrix A". A lane's
operands are its registers as torch sees them: A and B [32 lanes, 8] 16-bit floats (m16n8k32) or [32, 16] int8
(m16n8k64), metadata one word per lane.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Product(NamedTuple):
    """left [16, K] as the instruction sees it, kept [16, K] where it has a value, sums [32 lanes, 4]."""

    left: Tensor
    kept: Tensor
    sums: Tensor


def multiply(a: Tensor, b: Tensor, metadata: list[int], selector: int) -> Product:
    """Operands of all lanes, times each other, in float64, which holds all sums of these tests exactly."""
    deep = 64 if a.dtype == torch.int8 else 32
    left, right = torch.zeros(16, deep, dtype=torch.float64), torch.zeros(deep, 8, dtype=torch.float64)
    kept = torch.zeros(16, deep, dtype=torch.bool)
    decode = _int8 if a.dtype == torch.int8 else _half
    for lane in range(32):
        for i in range(a.shape[1]):
            row, column = decode(lane, i, metadata, selector)
            assert not kept[row, column], "two values in one place"
            kept[row, column] = True
            left[row, column] = a[lane, i]
        for i in range(b.shape[1]):
            right[_b_row(lane, i, a.dtype), lane >> 2] = b[lane, i]
    whole = left @ right
    places = [[c_place(lane, i) for i in range(4)] for lane in range(32)]
    return Product(left, kept, torch.stack([torch.stack([whole[place] for place in four]) for four in places]))


def c_place(lane: int, i: int) -> tuple[int, int]:
    """(row, column) of ci: both shapes have the accumulators of mma.m16n8k16."""
    return (lane >> 2) + (0 if i < 2 else 8), (lane % 4) * 2 + (i & 1)


def _half(lane: int, i: int, metadata: list[int], selector: int) -> tuple[int, int]:
    """(row, column) of ai in sparse m16n8k32 with .f16 and .bf16 types."""
    group, thread = lane >> 2, lane % 4
    row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
    first = thread * 4 + (0 if i < 4 else 16)
    # A thread pair contributes: selector 0 are threads 0 and 1 of the four, 1 are threads 2 and 3. The first of a pair
    # has columns 0 to 15, the second 16 to 31; bits 0 to 15 belong to row `group`, 16 to 31 to `group` + 8.
    pair = (0, 1) if selector == 0 else (2, 3)
    word = metadata[group * 4 + pair[first // 16]]
    bits = (word >> (0 if row == group else 16)) & 0xFFFF
    index = (bits >> (first % 16 // 4 * 4 + (i & 1) * 2)) & 3
    return row, first + index


def _int8(lane: int, i: int, metadata: list[int], selector: int) -> tuple[int, int]:
    """(row, column) of ai in sparse m16n8k64 with .u8 / .s8 integer type."""
    assert selector == 0, "all four threads contribute"
    group, thread = lane >> 2, lane % 4
    row = group if 0 <= i < 4 or 8 <= i < 12 else group + 8
    # Eight columns of which four are kept: the first two in the first four columns.
    first = thread * 8 + (0 if i < 8 else 32) + (0 if i % 4 < 2 else 4)
    # Threads 0 and 1 have columns 0 to 31 of rows `group` and `group` + 8, threads 2 and 3 have columns 32 to 63.
    thread_of = (0 if first < 32 else 2) + (0 if row == group else 1)
    index = (metadata[group * 4 + thread_of] >> (first % 32 // 4 * 4 + (i & 1) * 2)) & 3
    return row, first + index


def _b_row(lane: int, i: int, dtype: torch.dtype) -> int:
    """Row of bi; its column is the group."""
    if dtype == torch.int8:
        return (lane % 4) * 4 + (i & 3) + 16 * (i // 4)
    return (lane % 4) * 2 + (i & 1) + 8 * (i // 2)
