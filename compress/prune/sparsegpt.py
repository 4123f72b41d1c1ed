"""SparseGPT (arXiv 2301.00774): prune group by group of columns, what is lost made up for by the columns that follow.

With gptq behind it both may work at once, which loses less than one after the other: `joint`.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from compress.formats.pattern import Pattern, keep_largest
from compress.prune import Pruned
from compress.solver import factorize, prune_columns, visiting_order
from compress.stats import InputStats

NEEDS = frozenset({"hessian"})


class Config(BaseModel):
    """damping: share of the mean Hessian diagonal added to it. block_size: columns per lazy update.

    joint: where gptq quantizes the same layer, it does both, under its own settings and one factor of the Hessian.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    damping: float = Field(default=0.01, ge=0, le=1)
    block_size: int = Field(default=128, ge=1)
    activation_order: bool = True
    joint: bool = True


def prune(weight: Tensor, stats: InputStats | None, pattern: Pattern, config: Config, dtype: torch.dtype) -> Pruned:
    """Prune `weight` [N, K], float32 or float64 as the Hessian is, against the Hessian of `stats`; kept values are
    rounded to `dtype`.

    Where the Hessian cannot be factored even at full damping, weights are pruned by magnitude and `fallback` says so.
    """
    if stats is None or stats.hessian is None:
        raise ValueError("sparsegpt needs the Hessian of its inputs")
    order = visiting_order(stats.hessian, config.activation_order, pattern.of)
    factor = factorize(stats.hessian, config.damping, order)
    if factor is None:
        mask = keep_largest(weight.abs(), pattern)
        return Pruned(
            weight * mask, mask, fallback="Hessian not positive definite at full damping: pruned by magnitude"
        )
    kept, mask = prune_columns(weight, factor.upper, order, pattern, config.block_size, dtype)
    return Pruned(kept, mask, damping=factor.damping)
