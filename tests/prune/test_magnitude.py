"""Magnitude pruning against the mask that keeps most, found by trying all."""

from __future__ import annotations

import torch

from compress.formats.pattern import Pattern, follows, keep_largest
from compress.prune import magnitude
from tests.prune.oracle import HALF, PATTERNS, best_mask, weight


@PATTERNS
def test_magnitude_keeps_the_largest(pattern: Pattern) -> None:
    pruned = magnitude.prune(weight(), None, pattern, magnitude.Config(), torch.bfloat16)
    assert torch.equal(pruned.mask, best_mask(weight().abs(), pattern))
    assert torch.equal(pruned.weight, weight() * pruned.mask)


def test_ties_keep_as_many() -> None:
    assert torch.equal(keep_largest(torch.zeros(1, 8), HALF), torch.tensor([[True, True, False, False] * 2]))
    assert not follows(torch.ones(1, 8, dtype=torch.bool), HALF) and not follows(torch.ones(1, 6).bool(), HALF)
