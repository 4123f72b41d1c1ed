"""Paged decode attention in Triton against plain torch: ragged lengths, shared heads, windows, capped scores, int8."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from compress.errors import InputError
from compress.kernels.triton.launch import TILES, Heads, Scores, attention, attention_refuses
from tests.kernels.interpreter import interpreted

GENERATOR = torch.Generator().manual_seed(11)
PAGE = TILES["attention_attend"]["PAGE"]


@dataclass(frozen=True)
class Case:
    """Heads, tokens held per sequence, and what becomes of the scores."""

    heads: Heads
    lengths: tuple[int, ...]
    scores: Scores = field(default_factory=lambda: Scores(0.125))
    processors: int = 1


CASES = {
    "one head": Case(Heads(1, 1, 64), (1,)),
    "ragged": Case(Heads(6, 2, 64), (1, 63, 64, 65, 200)),
    "ragged, in parts": Case(Heads(6, 2, 64), (700, 1, 300, 0), processors=64),
    "wide heads": Case(Heads(4, 4, 128), (130, 7), Scores(0.09)),
    "more query heads than a tile": Case(Heads(20, 1, 64), (75,)),
    "window": Case(Heads(2, 1, 64), (50, 130, 200), Scores(0.125, window=100)),
    "window, in parts": Case(Heads(2, 1, 64), (600, 40), Scores(0.125, window=300), processors=64),
    "capped": Case(Heads(4, 2, 64), (100,), Scores(4.0, cap=30.0)),
}


def expected(case: Case, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """query [B, H, d], keys and values [B, h, S, d] in float64, of which sequence b holds lengths[b]: [B, H, d]."""
    out = torch.zeros_like(query)
    shared = case.heads.query // case.heads.key
    for sequence, length in enumerate(case.lengths):
        oldest = max(0, length - case.scores.window) if case.scores.window else 0
        for head in range(case.heads.query):
            seen = slice(oldest, length)
            scores = keys[sequence, head // shared, seen] @ query[sequence, head] * case.scores.scale
            if case.scores.cap:
                scores = case.scores.cap * torch.tanh(scores / case.scores.cap)
            out[sequence, head] = scores.softmax(0) @ values[sequence, head // shared, seen]
    return out


def paged(cache: Tensor, table: Tensor, pages: int) -> Tensor:
    """cache [B, h, S, ...], S whole pages, as pages [pages, h, PAGE, ...]; pages that nobody owns hold garbage."""
    split = cache.unflatten(2, (-1, PAGE)).transpose(1, 2)  # [B, S / PAGE, h, PAGE, ...]
    out = torch.full((pages, *split.shape[2:]), 99, dtype=cache.dtype)
    out[table.long()] = split
    return out


def quantize(cache: Tensor) -> tuple[Tensor, Tensor]:
    """int8 with a float32 scale per head and token."""
    scale = cache.abs().amax(-1) / 127
    return (cache / scale.unsqueeze(-1)).round().to(torch.int8), scale


def attended(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the kernels make of random queries and a random cache, in `dtype`, and what float64 makes of the same."""
    heads, sequences = case.heads, len(case.lengths)
    limit = -(-max(case.lengths) // PAGE) + 1
    shape = (sequences, heads.key, limit * PAGE, heads.width)
    query = torch.randn(sequences, heads.query, heads.width, generator=GENERATOR).to(dtype)
    keys, values = (torch.randn(shape, generator=GENERATOR).to(dtype) for _ in range(2))
    pages = sequences * limit + 3
    table = torch.randperm(pages, generator=GENERATOR)[: sequences * limit].view(sequences, limit).int()
    tensors = {"query": query, "table": table, "lengths": torch.tensor(case.lengths, dtype=torch.int32)}
    tensors["out"] = torch.full_like(query, torch.nan)
    if heads.int8:
        (keys, key_scales), (values, value_scales) = quantize(keys.float()), quantize(values.float())
        tensors |= {"key_scales": paged(key_scales, table, pages), "value_scales": paged(value_scales, table, pages)}
    tensors |= {"keys": paged(keys, table, pages), "values": paged(values, table, pages)}
    if heads.int8:
        keys, values = keys.double() * key_scales.unsqueeze(-1), values.double() * value_scales.unsqueeze(-1)
    plan = attention(heads, case.scores, (sequences, limit), "bf16", case.processors)
    got = interpreted(plan, tensors)["out"]
    return got, expected(case, query.double(), keys.double(), values.double())


def decibels(got: Tensor, want: Tensor) -> float:
    """Signal to noise ratio of `got`."""
    return float(10 * torch.log10(want.square().sum() / (got.double() - want).square().sum()))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention(case: Case) -> None:
    """In float32 throughout, so that little is left but the order of the sums."""
    got, want = attended(case, torch.float32)
    assert decibels(got, want) > 110
    assert all((got[sequence] == 0).all() for sequence, length in enumerate(case.lengths) if length == 0)


@pytest.mark.parametrize("name", ["ragged", "ragged, in parts", "window", "capped"])
def test_attention_over_an_int8_cache(name: str) -> None:
    case = CASES[name]
    heads = Heads(case.heads.query, case.heads.key, case.heads.width, int8=True)
    got, want = attended(Case(heads, case.lengths, case.scores, case.processors), torch.float32)
    assert decibels(got, want) > 110


@pytest.mark.parametrize("int8", [False, True], ids=["16 bits", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_attention_in_16_bits(dtype: torch.dtype, int8: bool) -> None:
    """Probabilities and outputs are rounded; float16 with int8 carries its probabilities in bfloat16."""
    got, want = attended(Case(Heads(6, 2, 64, int8), (65, 200)), dtype)
    assert got.dtype == dtype
    assert decibels(got, want) > (60 if dtype == torch.float16 and not int8 else 44)


def test_the_plans_in_parts_have_parts() -> None:
    for name, case in CASES.items():
        limit = -(-max(case.lengths) // PAGE) + 1
        plan = attention(case.heads, case.scores, (len(case.lengths), limit), "bf16", case.processors)
        assert ("in parts" in name) == (len(plan.steps) == 2)


def test_heads_without_a_binary_are_refused_with_a_reason() -> None:
    assert attention_refuses(Heads(8, 2, 128), "fp16") is None
    assert "heads are 80 wide, not 64, 128" in str(attention_refuses(Heads(8, 2, 80), "bf16"))
    assert "7 query heads do not share 2" in str(attention_refuses(Heads(7, 2, 64), "bf16"))
    with pytest.raises(InputError, match="activations are fp32, not bf16 or fp16: use the reference"):
        attention(Heads(8, 2, 64), Scores(0.1), (1, 4), "fp32", 132)
