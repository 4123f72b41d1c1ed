"""Registers for `mma.sp`: what `prepare` lays out is, by the PTX ISA's tables, the dense product and the mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.formats import sparse24
from compress.formats.grid import Grid, Quantized
from compress.formats.pattern import keep_largest
from compress.kernels.sparse.layout import BLOCK, STRIP, group_scales, register_metadata, register_values
from tests.kernels import mma_sparse

GENERATOR = torch.Generator().manual_seed(0)
DTYPES = {16: torch.bfloat16, 8: torch.int8, 4: torch.int8}
PRODUCTS = {16: 4, 8: 2, 4: 4}  # of a block


def random_weight(bits: int, rows: int, columns: int) -> Quantized:
    """Every mask of four columns is there; a tenth of the kept values, and all of some groups, are zero."""
    mask = keep_largest(torch.rand(rows, columns, generator=GENERATOR), sparse24.PATTERN)
    low, high = (-8, 8) if bits == 4 else (-128, 128)
    q = torch.randint(low, high, (rows, columns), generator=GENERATOR).to(DTYPES[bits])
    q[torch.rand(rows, columns, generator=GENERATOR) < 0.1] = 0
    q[:: rows // 4, 4:8] = 0
    q[~mask] = 0
    return Quantized(q, torch.ones(rows, 1), mask=mask)


def operand(words: Tensor, bits: int, product: int) -> Tensor:
    """Operand A of a product [32 lanes, values], from a block's registers int32 [quads, 32 lanes, 4]."""
    if bits == 16:
        return words[product].contiguous().view(torch.bfloat16)
    if bits == 8:
        return words[product].contiguous().view(torch.int8)
    # As the kernel brings int4 to 16 bits: nibble r is the first value of register r, nibble r + 4 its second.
    word = words[0, :, product].long() & 0xFFFFFFFF
    nibbles = [((word >> 4 * (register + 4 * second)) & 15) - 8 for register in range(4) for second in range(2)]
    return torch.stack(nibbles, dim=1).to(torch.bfloat16)


def tokens_operand(x: Tensor) -> Tensor:
    """Operand B [32 lanes, values] of 8 tokens x [8, depth], as ldmatrix gives it: 4 bytes at a time, of lane / 4."""
    lanes = []
    raw = x.contiguous().view(torch.uint8)
    for lane in range(32):
        parts = [raw[lane // 4, 16 * part + 4 * (lane % 4) :][:4] for part in range(4)]
        lanes.append(torch.cat(parts))
    return torch.stack(lanes).view(x.dtype)


@pytest.mark.parametrize(("rows", "columns"), [(32, 256), (16, 128), (24, 144), (40, 48)])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_emulated_products_equal_the_dense_one(bits: int, rows: int, columns: int) -> None:
    """And the places where the instruction sees a value are the mask, zero or not."""
    weight = random_weight(bits, rows, columns)
    stored = sparse24.pack(weight, Grid(bits))
    values, metadata = register_values(stored["weight_values"], bits), register_metadata(stored["weight_indices"], bits)
    strips, blocks = -(-rows // STRIP), -(-columns // BLOCK)
    assert values.shape == (strips, blocks, bits // 4, 32, 4) and metadata.shape == (strips, blocks, 32, 2)
    assert values.dtype == metadata.dtype == torch.int32 and values.is_contiguous() and metadata.is_contiguous()
    x = torch.randint(-128, 128, (8, columns), generator=GENERATOR).to(torch.int8 if bits == 8 else torch.bfloat16)
    padded = F.pad(x, (0, blocks * BLOCK - columns))
    dense, kept = torch.zeros(strips * STRIP, blocks * BLOCK), torch.zeros(strips * STRIP, blocks * BLOCK).bool()
    out = torch.zeros(strips * STRIP, 8, dtype=torch.float64)
    deep = BLOCK // PRODUCTS[bits]
    for strip in range(strips):
        for block in range(blocks):
            for product in range(PRODUCTS[bits]):
                first = block * BLOCK + product * deep
                place = (slice(strip * STRIP, (strip + 1) * STRIP), slice(first, first + deep))
                word, selector = (product, 0) if bits == 8 else (product // 2, product % 2)
                done = mma_sparse.multiply(
                    operand(values[strip, block], bits, product),
                    tokens_operand(padded[:, first : first + deep]),
                    metadata[strip, block, :, word].tolist(),
                    selector,
                )
                dense[place], kept[place] = done.left.float(), done.kept
                for lane in range(32):
                    for i in range(4):
                        row, token = mma_sparse.c_place(lane, i)
                        out[strip * STRIP + row, token] += done.sums[lane, i]
    assert torch.equal(dense[:rows, :columns], weight.q.float())
    assert weight.mask is not None and torch.equal(kept[:rows, :columns], weight.mask)
    assert not dense[rows:].any() and not dense[:, columns:].any()
    assert torch.equal(out[:rows], weight.q.double() @ x.double().T)


def test_padding_keeps_two_of_four_in_ascending_order() -> None:
    stored = sparse24.pack(random_weight(8, 8, 16), Grid(8))
    metadata = register_metadata(stored["weight_indices"], 8)
    assert (metadata[0, 0, 2:4] == 0x44444444).all(), "columns 32 to 63 of rows 0 and 8, and 96 to 127"
    assert (metadata[0, 0, 1::4] == 0x44444444).all(), "rows 8 to 15"


@pytest.mark.parametrize("place", [0, 4])
@pytest.mark.parametrize("code", [0b0000, 0b0001, 0b1111, 0b0110])
def test_indices_that_do_not_ascend_are_refused(code: int, place: int) -> None:
    indices = torch.full((16, 2), 0x44, dtype=torch.uint8)
    indices[3, 1] = 0x44 & ~(15 << place) | code << place
    with pytest.raises(ValueError, match="do not ascend within their four columns"):
        register_metadata(indices, 8)


def test_scales_of_a_group_lie_side_by_side() -> None:
    scale = torch.arange(20 * 3.0).view(20, 3)
    laid = group_scales(scale)
    assert laid.shape == (3, 32) and laid.is_contiguous()
    assert torch.equal(laid[:, :20], scale.T) and not laid[:, 20:].any()
