"""int8 weights times activations quantized per token: W8A8, and LLM.int8() with static outlier columns.

Memory layout: `weight` int8 [N, K] and `scale` [N] as stored. `quantize` makes int8 [M, K] and a float32 step per token
of the activations, in the arithmetic of reference.quantize_tokens (IEEE division, ties to even, clamped), so that the
integers are the reference's own. `matrix` sums their products exactly in int32; sums are order-free, so the split over
K changes no bit. The end, in `finish`, is the reference's too: (sum * step) * scale in float32, plus the outliers.

Outlier columns (`int8-outlier`): `ordinary` int8 [K] is 0 in them, which keeps them out of a token's absmax; whatever
integers they get meet weights that are 0. `quantize` also gathers them into [M, P] 16-bit, P = n padded to whole tiles,
and `finish` multiplies that with the outlier weights [N, P] in the tensor cores: one tile for up to 16 columns, added
while the sums are still in registers. `counts` int64 [2] grows by the activations of at least `threshold` outside those
columns, and by all.

Bounds: `quantize` by launch latency at small M, by bandwidth at large; `matrix` by the bandwidth of the weights with
few tokens, by int8 tensor cores with many.

After: LLM.int8() (arXiv 2208.07339), sections 3.1 and 3.2; per-token steps as in ZeroQuant (arXiv 2206.01861).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantize(
    x: tl.tensor,
    ordinary: tl.tensor,
    outlier_columns: tl.tensor,
    integers: tl.tensor,
    steps: tl.tensor,
    gathered: tl.tensor,
    counts: tl.tensor,
    columns: tl.tensor,
    outliers: tl.tensor,
    padded: tl.tensor,
    levels: tl.tensor,
    threshold: tl.tensor,
    OUTLIERS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One token per program: integers [M, K] and steps [M] with x ~ integers * step, step = absmax / levels.

    The second reading of x comes out of the cache. A token with a NaN or an infinity gets a step that is not finite.
    """
    token = tl.program_id(0)
    x += token * columns
    integers += token * columns
    # Magnitudes compare as their bits do, and NaN above all: a maximum of floats would lose it.
    largest = tl.zeros([BLOCK], tl.int32)
    missed = tl.zeros([BLOCK], tl.int32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + column, mask=column < columns, other=0.0).to(tl.float32)
        magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if OUTLIERS:
            inside = tl.load(ordinary + column, mask=column < columns, other=0) != 0
            magnitude = tl.where(inside, magnitude, 0)
            missed += (magnitude.to(tl.float32, bitcast=True) >= threshold).to(tl.int32)
        largest = tl.maximum(largest, magnitude)
    step = tl.div_rn(tl.max(largest, 0).to(tl.float32, bitcast=True), levels)
    step = tl.where(step == 0.0, 1.0, step)
    tl.store(steps + token, step)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + column, mask=column < columns, other=0.0).to(tl.float32)
        scaled = tl.div_rn(value, tl.zeros([BLOCK], tl.float32) + step)
        # Below 2^22, adding 1.5 * 2^23 leaves no bits for a fraction: the sum is rounded to an integer, ties to even.
        # Clamped first, to integers too, which comes to the same and keeps infinities out.
        scaled = tl.minimum(tl.maximum(scaled, -128.0), 127.0)
        rounded = (scaled + 12582912.0) - 12582912.0
        tl.store(integers + column, rounded.to(tl.int32).to(tl.int8), mask=column < columns)
    if OUTLIERS:
        for start in range(0, padded, TILE):
            place = start + tl.arange(0, TILE)
            column = tl.load(outlier_columns + place, mask=place < outliers, other=0)
            value = tl.load(x + column, mask=place < outliers, other=0.0)
            tl.store(gathered + token * padded + place, value)
        tl.atomic_add(counts, tl.sum(missed, 0).to(tl.int64))
        tl.atomic_add(counts + 1, columns.to(tl.int64))


@triton.jit
def finish(
    total: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    steps: tl.tensor,
    scale: tl.tensor,
    gathered: tl.tensor,
    outlier_weight: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    padded: tl.tensor,
    OUTLIERS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Store out [M, N] at rows n, tokens m: int32 sums total [rows, tokens], scaled, and the outliers' product."""
    step = tl.load(steps + m, mask=m < tokens, other=0.0)
    row_scale = tl.load(scale + n, mask=n < rows, other=0.0).to(tl.float32)
    result = total.to(tl.float32) * step[None, :] * row_scale[:, None]
    if OUTLIERS:
        for start in range(0, padded, TILE):
            place = start + tl.arange(0, TILE)
            weight = tl.load(
                outlier_weight + (n * padded)[:, None] + place[None, :], mask=(n < rows)[:, None], other=0.0
            )
            value = tl.load(gathered + (m * padded)[None, :] + place[:, None], mask=(m < tokens)[None, :], other=0.0)
            result = tl.dot(weight, value, result)
    at = (m * rows)[None, :] + n[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=(m < tokens)[None, :] & (n < rows)[:, None])


@triton.jit
def matrix(
    integers: tl.tensor,
    steps: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    gathered: tl.tensor,
    outlier_weight: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    padded: tl.tensor,
    split: tl.tensor,
    OUTLIERS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """out [M, N], or int32 partial [split, M, N]: BLOCK_M tokens, BLOCK_N rows, BLOCK_K columns a step."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    depth = tl.cdiv(tl.cdiv(columns, BLOCK_K), split) * BLOCK_K
    first = tl.program_id(2) * depth
    for start in range(first, min(first + depth, columns), BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        left = tl.load(
            weight + (n * columns)[:, None] + column[None, :],
            mask=(n < rows)[:, None] & (column < columns)[None, :],
            other=0,
        )
        right = tl.load(
            integers + (m * columns)[None, :] + column[:, None],
            mask=(m < tokens)[None, :] & (column < columns)[:, None],
            other=0,
        )
        total = tl.dot(left, right, total, out_dtype=tl.int32)
    if split == 1:
        finish(total, m, n, steps, scale, gathered, outlier_weight, out, tokens, rows, padded, OUTLIERS, TILE)
    else:
        at = tl.program_id(2) * (tokens * rows) + (m * rows)[None, :] + n[:, None]
        tl.store(partial + at, total, mask=(m < tokens)[None, :] & (n < rows)[:, None])


@triton.jit
def combine(
    partial: tl.tensor,
    steps: tl.tensor,
    scale: tl.tensor,
    gathered: tl.tensor,
    outlier_weight: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    padded: tl.tensor,
    split: tl.tensor,
    OUTLIERS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """out [M, N] from int32 partial [split, M, N]."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = (m * rows)[None, :] + n[:, None]
    inside = (m < tokens)[None, :] & (n < rows)[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    for part in range(split):
        total += tl.load(partial + part * (tokens * rows) + at, mask=inside, other=0)
    finish(total, m, n, steps, scale, gathered, outlier_weight, out, tokens, rows, padded, OUTLIERS, TILE)
