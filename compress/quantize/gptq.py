"""GPTQ (arXiv 2210.17323): round column by column, each error compensated by the columns that follow.

Columns are visited by falling activation energy (the paper's implementation calls it act-order), with the scales of
the original, unpermuted groups fixed beforehand ("static"), so that the result needs no index at run time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from compress.formats.grid import Grid, Quantized
from compress.formats.pattern import Pattern, keep_largest
from compress.quantize import Solved
from compress.quantize.scales import Search, choose_scales, round_to_grid
from compress.solver import (
    Factor,
    back_in_order,
    factorize,
    pivot_costs,
    prune_columns,
    refit_columns,
    solve_columns,
    visiting_order,
)
from compress.stats import InputStats

NEEDS = frozenset({"hessian"})
REFITS = 2  # of what SparseGPT keeps: on a language model they take 12 and 2 % of the error, a third less than 1 %


class Config(BaseModel):
    """damping: share of the mean Hessian diagonal added to it. block_size: columns per lazy update."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    damping: float = Field(default=0.01, ge=0, le=1)
    block_size: int = Field(default=128, ge=1)
    activation_order: bool = True
    search: Search = "mse"


def quantize(
    weight: Tensor,
    stats: InputStats | None,
    grid: Grid,
    config: Config,
    scale_dtype: torch.dtype,
    sparsity: Pattern | Tensor | None = None,
) -> Solved:
    """Put `weight` [N, K], float32 or float64 as the Hessian is, on `grid` against the Hessian of `stats`.

    sparsity: a mask bool [N, K] to be held, or a pattern: SparseGPT and GPTQ under one factor of the Hessian. Unlike a
    stage that is handed a pruned weight, this one knows what the outputs were before: what SparseGPT keeps is refitted
    to it, early columns making up for late ones, then scales are chosen for it and it is rounded under its mask.
    Where the Hessian cannot be factored even at full damping, the weight is rounded to nearest (and pruned by
    magnitude), and `fallback` says so.
    """
    if stats is None or stats.hessian is None:
        raise ValueError("gptq needs the Hessian of its inputs")
    width = sparsity.of if isinstance(sparsity, Pattern) else 1
    order = visiting_order(stats.hessian, config.activation_order, width)
    factor = factorize(stats.hessian, config.damping, order)
    if factor is None:
        mask = keep_largest(weight.abs(), sparsity) if isinstance(sparsity, Pattern) else sparsity
        kept = weight if mask is None else weight * mask
        scale, zero = choose_scales(kept, grid, config.search, scale_dtype)
        q = round_to_grid(kept, scale, zero, grid)
        return Solved(
            Quantized(q, scale, zero, mask=mask),
            fallback="Hessian not positive definite at full damping: rounded to nearest"
            + (", pruned by magnitude" if isinstance(sparsity, Pattern) else ""),
        )
    mask = sparsity if isinstance(sparsity, Tensor) else None
    if isinstance(sparsity, Pattern):
        kept, mask = prune_columns(weight, factor.upper, order, sparsity, config.block_size, weight.dtype)
        for _ in range(REFITS):
            kept = refit_columns(weight, kept, mask, stats.hessian, factor.damping, config.block_size)
        weight = kept
    costs = pivot_costs(factor.upper, order)
    scale, zero = choose_scales(weight if mask is None else weight * mask, grid, config.search, scale_dtype, costs)
    q = _solve(weight, Columns(factor, order, config.block_size), (scale, zero), grid, mask)
    return Solved(Quantized(q, scale, zero, mask=mask), damping=factor.damping)


class Columns(NamedTuple):
    """How the columns are visited: the factored Hessian, their order (None: as they are), columns per lazy update."""

    factor: Factor
    order: Tensor | None
    block_size: int


def _solve(
    weight: Tensor, columns: Columns, steps: tuple[Tensor, Tensor | None], grid: Grid, mask: Tensor | None
) -> Tensor:
    """Integers int8 [N, K] for `weight` [N, K] under fixed scales and zero points [N, G], zero outside of `mask`."""
    rows, count = weight.shape
    visit = torch.arange(count, device=weight.device) if columns.order is None else columns.order
    scale = steps[0].T.to(weight.dtype).contiguous()  # [G, N]: one contiguous row per group
    zero = None if steps[1] is None else steps[1].T.to(weight.dtype).contiguous()
    group_of = (visit // (count // len(scale))).tolist()
    integers = torch.empty(count, rows, dtype=torch.int8, device=weight.device)
    held = None if mask is None else mask.T[visit]

    def decide(j: int, values: Tensor) -> Tensor:
        group = group_of[j]
        q = values / scale[group]
        if zero is not None:
            q.add_(zero[group])
        q.round_().clamp_(grid.minimum, grid.maximum)
        if held is not None:
            q.mul_(held[j])
        integers[j] = q
        return (q if zero is None else q.sub_(zero[group])).mul_(scale[group])

    solve_columns(weight.T[visit], columns.factor.upper, decide, columns.block_size)
    return back_in_order(integers, visit)
