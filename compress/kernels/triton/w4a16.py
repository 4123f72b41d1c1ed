"""Weight-only integers times 16-bit activations: y [M, N] = x [M, K] times W [N, K] transposed.

A stored u stands for w = (u - 2^(BITS - 1) - zero) * scale. Memory layout: `words` int32 [N, blocks * 16]. A block
is 16 words, or 128 columns of 4 bits, or 64 of 8; bits j * BITS.. of its word w hold column j * 16 + w of the block
(layout.py makes this from the stored words, and back). One word index thus names 16 neighbouring columns for every j,
and nothing ever has to be interleaved: in `vector` a thread reads 16 bytes of weights and, for each j, the 4
neighbouring activations that go with them; in `matrix` the values j of a block are a [rows, 16] operand of one
tensor-core step, unpacked in the registers in which that step wants them.
`scales` [N, G] and `zeros` int8 [N, G] are as stored; SLOTS of each block's columns are known to share one.

Unpacking costs a shift, one AND-OR and one FMA per weight and no conversion instruction: the bits of u go on top of the
significand of 1.0, which gives 1 + u / 2^BITS, and (1 + u / 2^BITS) * s - c * s with s = 2^BITS * scale is the weight,
exactly, since every product here fits into float32. `matrix` rounds it to the activations' type, as reference.py does.

Bounds: `vector` (one token) and `matrix` with few tokens by the bandwidth that streams the words; `matrix` with many by
the tensor cores and, with them, by the unpacking. K is split over programs until the device is full; partial sums are
float32 and `combine` adds them in a fixed order, so that results do not change from run to run.

After: Marlin (arXiv 2408.11743) for unpacking by bits of a float, in the registers of the left operand; split K for
skinny products: Stream-K (arXiv 2301.03598), and in Triton for this very product arXiv 2402.00025.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def significands(words: tl.tensor, index: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """The values u at `index` of each word, as float32 1 + u / 2^BITS."""
    TOP: tl.constexpr = 23 - BITS
    moved = words << (TOP - index * BITS) if index * BITS <= TOP else words >> (index * BITS - TOP)
    return ((moved & (((1 << BITS) - 1) << TOP)) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def scaling(
    scales: tl.tensor, zeros: tl.tensor, at: tl.tensor, inside: tl.tensor, asymmetric: tl.tensor, BITS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """s and c such that (significand - c) * s is the weight. Without zero points their loads are masked out."""
    scale = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32) * (1 << BITS)
    zero = tl.load(zeros + at, mask=inside & (asymmetric != 0), other=0).to(tl.float32)
    return scale, zero * (1.0 / (1 << BITS)) + 1.5


@triton.jit
def vector(
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    blocks: tl.tensor,
    groups: tl.tensor,
    shift: tl.tensor,
    asymmetric: tl.tensor,
    split: tl.tensor,
    BITS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """out [N], or partial [split, N], of one token: BLOCK_N rows and a part of the columns per program.

    One warp per program, each lane with 16 bytes of every row: no shared memory and no barrier in the loop. Group of a
    column: column >> shift. Products are float32 throughout.
    """
    VALUES: tl.constexpr = 32 // BITS
    WIDTH: tl.constexpr = 16 * VALUES
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    quad = tl.arange(0, BLOCKS * 4)  # 4 words each, so 4 to a block
    lane = tl.arange(0, 4)
    total = tl.zeros([BLOCK_N, BLOCKS * 4], tl.float32)
    steps = tl.cdiv(tl.cdiv(blocks, BLOCKS), split)
    first = tl.program_id(1) * steps
    for step in range(first, first + steps):
        block = step * BLOCKS + quad // 4
        word = (step * BLOCKS * 16 + quad * 4)[:, None] + lane[None, :]
        packed = tl.load(
            words + (n * (blocks * 16))[:, None, None] + word[None, :, :],
            mask=(n < rows)[:, None, None] & (block < blocks)[None, :, None],
            other=0,
        )
        for slot in tl.static_range(SLOTS):
            products = tl.zeros([BLOCK_N, BLOCKS * 4, 4], tl.float32)
            sums = tl.zeros([BLOCKS * 4, 4], tl.float32)
            for value in tl.static_range(slot * (VALUES // SLOTS), (slot + 1) * (VALUES // SLOTS)):
                column = (block * WIDTH + (quad % 4) * 4 + value * 16)[:, None] + lane[None, :]
                some = tl.load(x + column, mask=column < columns, other=0.0).to(tl.float32)
                products += significands(packed, value, BITS) * some[None, :, :]
                sums += some
            group = (block * WIDTH + slot * (WIDTH // SLOTS)) >> shift
            at = (n * groups)[:, None] + group[None, :]
            scale, middle = scaling(
                scales, zeros, at, (n < rows)[:, None] & (group < groups)[None, :], asymmetric, BITS
            )
            total += (tl.sum(products, 2) - middle * tl.sum(sums, 1)[None, :]) * scale
    result = tl.sum(total, 1)
    if split == 1:
        tl.store(out + n, result.to(out.dtype.element_ty), mask=n < rows)
    else:
        tl.store(partial + tl.program_id(1) * rows + n, result, mask=n < rows)


@triton.jit
def activations(x: tl.tensor, m: tl.tensor, column: tl.tensor, tokens: tl.tensor, columns: tl.tensor) -> tl.tensor:
    """x [M, K] at tokens m and some columns, transposed."""
    inside = (m < tokens)[None, :] & (column < columns)[:, None]
    return tl.load(x + (m * columns)[None, :] + column[:, None], mask=inside, other=0.0)


@triton.jit
def matrix(
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    blocks: tl.tensor,
    groups: tl.tensor,
    shift: tl.tensor,
    asymmetric: tl.tensor,
    split: tl.tensor,
    BITS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    JOINED: tl.constexpr,
) -> None:
    """out [M, N], or partial [split, M, N]: a tile of BLOCK_M tokens and BLOCK_N rows, one block of columns a step.

    The weights are the left operand and the transposed activations the right one, so that the long side of the
    tensor-core instruction lies along the rows (few tokens waste little of it) and unpacked weights stay in registers.
    JOINED: a block is unpacked as a whole for one product, not value by value for several. Up to Hopper that would cost
    registers (it spills) and a way through shared memory; on Blackwell the left operand lies in tensor memory anyway.
    """
    VALUES: tl.constexpr = 32 // BITS
    WIDTH: tl.constexpr = 16 * VALUES
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, 16)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    steps = tl.cdiv(blocks, split)
    first = tl.program_id(2) * steps
    for block in range(first, min(first + steps, blocks)):
        packed = tl.load(
            words + (n * (blocks * 16))[:, None] + (block * 16 + lane)[None, :], mask=(n < rows)[:, None], other=0
        )
        if JOINED:
            span = (block * WIDTH + tl.arange(0, SLOTS) * (WIDTH // SLOTS)) >> shift
            at = (n * groups)[:, None] + span[None, :]
            scale, middle = scaling(scales, zeros, at, (n < rows)[:, None] & (span < groups)[None, :], asymmetric, BITS)
            values = packed[:, None, :] >> (tl.arange(0, VALUES) * BITS)[None, :, None]
            floats = tl.reshape(significands(values, 0, BITS), [BLOCK_N, SLOTS, WIDTH // SLOTS])
            weight = tl.reshape(floats * scale[:, :, None] - (middle * scale)[:, :, None], [BLOCK_N, WIDTH])
            some = activations(x, m, block * WIDTH + tl.arange(0, WIDTH), tokens, columns)
            total = tl.dot(weight.to(some.dtype), some, total)
        else:
            for slot in tl.static_range(SLOTS):
                # Rows' neighbouring groups share a cache line: the line is fetched once in some 16 steps.
                span = (block * WIDTH + slot * (WIDTH // SLOTS)) >> shift
                scale, middle = scaling(
                    scales, zeros, n * groups + span, (n < rows) & (span < groups), asymmetric, BITS
                )
                base = middle * scale
                for value in tl.static_range(slot * (VALUES // SLOTS), (slot + 1) * (VALUES // SLOTS)):
                    some = activations(x, m, block * WIDTH + value * 16 + lane, tokens, columns)
                    weight = significands(packed, value, BITS) * scale[:, None] - base[:, None]
                    total = tl.dot(weight.to(some.dtype), some, total)
    at = (m * rows)[None, :] + n[:, None]
    inside = (m < tokens)[None, :] & (n < rows)[:, None]
    if split == 1:
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(partial + tl.program_id(2) * (tokens * rows) + at, total, mask=inside)


@triton.jit
def combine(partial: tl.tensor, out: tl.tensor, count: tl.tensor, split: tl.tensor, BLOCK: tl.constexpr) -> None:
    """out [count] = the sum of partial [split, count] in ascending order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(split):
        total += tl.load(partial + part * count + at, mask=at < count, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)
