"""Wanda against the mask that keeps most of weight times input, found by trying all."""

from __future__ import annotations

import pytest
import torch

from compress.formats.pattern import Pattern
from compress.prune import wanda
from compress.stats import StatsAccumulator
from tests.prune.oracle import COLUMNS, HALF, PATTERNS, best_mask, weight


@PATTERNS
def test_wanda_weighs_by_the_input(pattern: Pattern) -> None:
    x = torch.randn(50, COLUMNS, generator=torch.Generator().manual_seed(5)) * torch.linspace(0.1, 4, COLUMNS)
    seen = StatsAccumulator("layer", wanda.NEEDS)
    seen.add(x[:20])
    seen.add(x[20:])
    pruned = wanda.prune(weight(), seen.result(), pattern, wanda.Config(), torch.bfloat16)
    assert torch.equal(pruned.mask, best_mask(weight().abs() * x.norm(dim=0), pattern))
    assert torch.equal(pruned.weight, weight() * pruned.mask)


def test_missing_statistics() -> None:
    with pytest.raises(ValueError, match="mean square"):
        wanda.prune(weight(), None, HALF, wanda.Config(), torch.float32)
