"""Wanda (arXiv 2306.11695): weights stay by magnitude times the size of the input they meet. Nothing else changes.

The score is section 3's, |w| ||x||_2, compared among the columns of one group of one row.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from compress.formats.pattern import Pattern, keep_largest
from compress.prune import Pruned
from compress.stats import InputStats

NEEDS = frozenset({"mean_square"})


class Config(BaseModel):
    """There is nothing to set."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def prune(weight: Tensor, stats: InputStats | None, pattern: Pattern, config: Config, dtype: torch.dtype) -> Pruned:
    """Keep of `weight` float32 [N, K] what the inputs behind `stats` make large. `dtype` has no say."""
    if stats is None or stats.mean_square is None:
        raise ValueError("wanda needs the mean square of its inputs")
    mask = keep_largest(weight.abs() * stats.mean_square.sqrt(), pattern)
    return Pruned(weight * mask, mask)
