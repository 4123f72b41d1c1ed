"""Magnitude pruning: the largest weights stay. No calibration; what others must beat."""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from compress.formats.pattern import Pattern, keep_largest
from compress.prune import Pruned
from compress.stats import InputStats

NEEDS: frozenset[str] = frozenset()


class Config(BaseModel):
    """There is nothing to set."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def prune(weight: Tensor, stats: InputStats | None, pattern: Pattern, config: Config, dtype: torch.dtype) -> Pruned:
    """Keep the largest of `weight` float32 [N, K]. `stats` and `dtype` have no say."""
    mask = keep_largest(weight.abs(), pattern)
    return Pruned(weight * mask, mask)
