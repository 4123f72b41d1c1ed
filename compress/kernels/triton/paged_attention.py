"""Decode attention over a paged cache: one query token per sequence, grouped heads, online softmax, keys split up.

Memory layout: `query` [B, H, d]; `keys` and `values` [pages, h, PAGE, d], 16-bit or int8; for int8 `key_scales` and
`value_scales` float32 [pages, h, PAGE], one per head and token (x = integer * scale); `table` int32 [B, limit], page
number of each run of PAGE tokens; `lengths` int32 [B], tokens held, the newest of which asks. A page holds one head's
tokens side by side, so that a step of the loop reads one contiguous PAGE x d tile of keys and one of values, and takes
a single page number. d is padded to a power of two by masks alone.

The H / h query heads of one key head are the rows of a tile of 16 and share its keys: each is read once. int8 keys
become 16-bit exactly and meet their scale in the scores; the values' scale goes into the probabilities.

Bound: bandwidth of the cache. One sequence is too little work for a device, so its pages are split over programs; each
leaves its output and the base-2 logarithm of its sum, and `combine` weighs them. A sequence of length 0 gives zeros.

After: PagedAttention (arXiv 2309.06180), FlashAttention (arXiv 2205.14135) for the online softmax, its split over keys
(Flash-Decoding), grouped queries (arXiv 2305.13245); capped scores from Gemma 2 (arXiv 2408.00118).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def capped(scores: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """cap * tanh(scores / cap), or the scores for a cap of 0.

    The exponential may be infinite: then the quotient is 0, and the tangent 1.
    """
    if cap > 0:
        size = tl.exp2(tl.abs(scores) * (2.0 / cap) * 1.4426950408889634)
        tangent = 1.0 - 2.0 / (size + 1.0)
        scores = tl.where(scores < 0, -tangent, tangent) * cap
    return scores


@triton.jit
def share(
    length: tl.tensor, window: tl.tensor, part: tl.tensor, split: tl.tensor, PAGE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The oldest token that is seen, and the pages (the first, and one past the last) of a part of those."""
    oldest = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    end = tl.cdiv(length, PAGE)
    pages = tl.cdiv(end - oldest // PAGE, split)
    first = oldest // PAGE + part * pages
    return oldest, first, tl.minimum(first + pages, end)


@triton.jit
def attend(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    table: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    logarithms: tl.tensor,
    heads: tl.tensor,
    key_heads: tl.tensor,
    limit: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    split: tl.tensor,
    INT8: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """out [B, H, d], or partial [B, H, split, d] float32 and logarithms [B, H, split].

    Program (sequence, key head and tile of its query heads, part of the pages). scale multiplies the scores; cap 0:
    none; window 0: all keys, else the last `window`.
    """
    # Where int8 values meet probabilities times their scales: float16 would lose the small ones.
    CARRIER: tl.constexpr = tl.bfloat16 if query.dtype.element_ty == tl.float16 else query.dtype.element_ty
    sequence = tl.program_id(0)
    group = heads // key_heads
    tiles = tl.cdiv(group, ROWS)
    key_head = tl.program_id(1) // tiles
    member = (tl.program_id(1) % tiles) * ROWS + tl.arange(0, ROWS)
    head = sequence * heads + key_head * group + member
    channel = tl.arange(0, BLOCK_D)
    token = tl.arange(0, PAGE)
    real = (member < group)[:, None] & (channel < HEAD)[None, :]
    asked = tl.load(query + (head * HEAD)[:, None] + channel[None, :], mask=real, other=0.0)

    length = tl.load(lengths + sequence)
    oldest, first, last = share(length, window, tl.program_id(2), split, PAGE)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for place in range(first, last):
        # 64 bits: a cache may hold more than 2^31 numbers.
        page = tl.load(table + sequence * limit + place).to(tl.int64) * key_heads + key_head
        within = token[:, None] * HEAD + channel[None, :]
        key = tl.load(keys + page * (PAGE * HEAD) + within, mask=(channel < HEAD)[None, :], other=0)
        value = tl.load(values + page * (PAGE * HEAD) + within, mask=(channel < HEAD)[None, :], other=0)
        if INT8:
            key = key.to(tl.float32).to(asked.dtype)
            value = value.to(tl.float32).to(CARRIER)
        scores = tl.dot(asked, tl.trans(key)) * scale
        if INT8:
            scores *= tl.load(key_scales + page * PAGE + token)[None, :]
        scores = capped(scores, cap) * 1.4426950408889634  # Base 2 from here on.
        position = place * PAGE + token
        scores = tl.where(((position >= oldest) & (position < length))[None, :], scores, float("-inf"))
        # Every page of the range holds a key that is seen, so the maximum is never minus infinity.
        larger = tl.maximum(most, tl.max(scores, 1))
        shrink = tl.exp2(most - larger)
        probability = tl.exp2(scores - larger[:, None])
        weight = weight * shrink + tl.sum(probability, 1)
        if INT8:
            probability *= tl.load(value_scales + page * PAGE + token)[None, :]
        total = tl.dot(probability.to(value.dtype), value, total * shrink[:, None])
        most = larger

    result = total / tl.where(weight > 0, weight, 1.0)[:, None]
    if split == 1:
        tl.store(out + (head * HEAD)[:, None] + channel[None, :], result.to(out.dtype.element_ty), mask=real)
    else:
        at = head * split + tl.program_id(2)
        tl.store(partial + (at * HEAD)[:, None] + channel[None, :], result, mask=real)
        tl.store(logarithms + at, most + tl.log2(weight), mask=member < group)


@triton.jit
def combine(
    partial: tl.tensor,
    logarithms: tl.tensor,
    out: tl.tensor,
    split: tl.tensor,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """out [B * H, d]: partial [B * H, split, d], each weighed by 2^logarithm. One program per query head."""
    head = tl.program_id(0)
    channel = tl.arange(0, BLOCK_D)
    most = float("-inf")
    for part in range(split):
        most = tl.maximum(most, tl.load(logarithms + head * split + part))
    most = tl.where(most > float("-inf"), most, 0.0)  # No key at all: every share is 2^-inf.
    weight = 0.0
    total = tl.zeros([BLOCK_D], tl.float32)
    for part in range(split):
        at = head * split + part
        share = tl.exp2(tl.load(logarithms + at) - most)
        weight += share
        total += share * tl.load(partial + at * HEAD + channel, mask=channel < HEAD, other=0.0)
    result = total / tl.where(weight > 0, weight, 1.0)
    tl.store(out + head * HEAD + channel, result.to(out.dtype.element_ty), mask=channel < HEAD)
