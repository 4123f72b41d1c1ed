"""From stored 2:4 tensors to the registers that `mma.sp` multiplies with: plain torch, done once, when a layer loads.

The names are those of the PTX ISA, "Matrix fragments for multiply-accumulate operation with sparse matrix A". Lane l of
a warp has groupID g = l / 4 and threadID_in_group t = l % 4. One product takes 16 rows of the weight (a "strip") and 64
bytes of each token: 32 columns of 16-bit floats (m16n8k32), 64 of int8 (m16n8k64). Of both, half the columns are kept,
so that a row's kept values of one product are 32 bytes, in "Sparse matrix storage": four columns after the other, two
values each.

Operand A, four registers of 4 bytes: registers 0 and 1 hold bytes 4t to 4t + 3 of rows g and g + 8, registers 2 and 3
bytes 16 + 4t to 16 + 4t + 3 of the same rows. The tables say it in columns: m16n8k32 gives a lane the kept of columns
4t to 4t + 3 and of those 16 further, two values of two bytes each; m16n8k64 those of columns 8t to 8t + 7 and of those
32 further, four values of one byte.

Metadata is two bits per kept value, its place among its four columns, the first value lowest: the stored indices as
they are, read as little-endian words.
m16n8k32: 16 bits per row cover 16 columns. A word is such 16 bits of row g (low) and of row g + 8 (high). Two lanes of
every four give a product's metadata: the lane with even t that of the first 16 columns, the one with odd t that of the
others. The sparsity selector says which two: 0 for t = 0 and 1, 1 for t = 2 and 3. So one register serves two products.
m16n8k64: 32 bits per row cover 32 columns. All four lanes give metadata (selector 0): t = 0 and 1 that of the first 32
columns, of row g and of row g + 8; t = 2 and 3 that of the others.

Columns go in blocks of 128, which are 4 products of 32 columns or 2 of 64, and of metadata 2 registers either way. Rows
are padded to whole strips and columns to whole blocks, with zeros that keep the first two of every four columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

STRIP = 16
BLOCK = 128
# Four columns whose first two are kept, twice.
PADDING_INDICES = 0x44
# An int4 value of 0 as it is stored, twice.
PADDING_NIBBLES = 0x88


def register_values(values: Tensor, bits: int) -> Tensor:
    """Stored `weight_values` (formats/sparse24.py) of `bits` bits -> int32 [strips, blocks, bits / 4, 32 lanes, 4].

    The last axis is one load of 16 bytes: the four registers of operand A of one product; of int4 those of four
    products, a word each, in which nibble r is register r's first value and nibble r + 4 its second.
    """
    stored = values.contiguous().view(torch.uint8)
    stored = _padded(stored, BLOCK * bits // 16, PADDING_NIBBLES if bits == 4 else 0)
    if bits == 4:
        nibbles = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(1)
        # Row halves, groups, blocks, products, register halves, threads, the two values of a register.
        parts = nibbles.view(-1, 2, 8, nibbles.shape[1] // 64, 4, 2, 4, 2).permute(0, 3, 2, 6, 4, 7, 5, 1)
        pairs = parts.flatten(-3).unflatten(-1, (4, 2))
        packed = (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32)
        return packed.view(packed.shape[0], packed.shape[1], 1, 32, 4)
    products = bits // 4
    # Row halves, groups, blocks, products, register halves, threads, bytes.
    parts = stored.view(-1, 2, 8, stored.shape[1] // (32 * products), products, 2, 4, 4)
    packed = parts.permute(0, 3, 4, 2, 6, 5, 1, 7).contiguous().view(torch.int32)
    return packed.view(packed.shape[0], packed.shape[1], products, 32, 4)


def register_metadata(indices: Tensor, bits: int) -> Tensor:
    """Stored `weight_indices` uint8 [N, K / 8] of values of `bits` bits -> int32 [strips, blocks, 32 lanes, 2].

    Raises ValueError for indices that do not ascend within their four columns: of those the instruction makes anything.
    """
    for place in (0, 4):
        if not bool(((indices >> place & 3) < (indices >> place + 2 & 3)).all()):
            raise ValueError("2:4 indices do not ascend within their four columns")
    stored = _padded(indices.contiguous(), BLOCK // 8, PADDING_INDICES)
    blocks = stored.shape[1] // 16
    if bits == 8:
        # Row halves, groups, blocks, products, column halves, bytes.
        parts = stored.view(-1, 2, 8, blocks, 2, 2, 4).permute(0, 3, 2, 5, 1, 4, 6)
    else:
        # Row halves, groups, blocks, registers, selectors, column halves, bytes.
        parts = stored.view(-1, 2, 8, blocks, 2, 2, 2, 2).permute(0, 3, 2, 5, 6, 4, 1, 7)
    return parts.flatten(-2).contiguous().view(torch.int32).view(-1, blocks, 32, 2)


def group_scales(scale: Tensor) -> Tensor:
    """Scales [N, G] -> [G, N in whole strips], zeros at the end."""
    return F.pad(scale, (0, 0, 0, -scale.shape[0] % STRIP)).T.contiguous()


def _padded(stored: Tensor, block_bytes: int, filling: int) -> Tensor:
    """`stored` uint8 [N, B] with whole strips of rows and whole blocks of bytes."""
    return F.pad(stored, (0, -stored.shape[1] % block_bytes, 0, -stored.shape[0] % STRIP), value=filling)
