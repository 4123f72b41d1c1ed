"""GPTQ (arXiv 2210.17323): round column by column, each error compensated by the columns that follow.

Columns are visited by falling activation energy (the paper's implementation calls it act-order), with the scales of
the original, unpermuted groups fixed beforehand ("static"), so that the result needs no index at run time.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from compress.formats.grid import Grid, Quantized
from compress.quantize import Solved
from compress.quantize.scales import Search, choose_scales, round_to_grid
from compress.solver import factorize, solve_columns
from compress.stats import InputStats

NEEDS = frozenset({"hessian"})


class Config(BaseModel):
    """damping: share of the mean Hessian diagonal added to it. block_size: columns per lazy update."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    damping: float = Field(default=0.01, ge=0, le=1)
    block_size: int = Field(default=128, ge=1)
    activation_order: bool = True
    search: Search = "mse"


def quantize(weight: Tensor, stats: InputStats | None, grid: Grid, config: Config, scale_dtype: torch.dtype) -> Solved:
    """Put `weight` float32 [N, K] on `grid` against the Hessian of `stats`.

    Where the Hessian cannot be factored even at full damping, the weight is rounded to nearest and `fallback` says so.
    """
    if stats is None or stats.hessian is None:
        raise ValueError("gptq needs the Hessian of its inputs")
    hessian = stats.hessian
    order = hessian.diagonal().argsort(descending=True, stable=True) if config.activation_order else None
    factor = factorize(hessian, config.damping, order)
    if factor is None:
        scale, zero = choose_scales(weight, grid, config.search, scale_dtype)
        q = round_to_grid(weight, scale, zero, grid)
        return Solved(
            Quantized(q, scale, zero), fallback="Hessian not positive definite at full damping: rounded to nearest"
        )
    scale, zero = choose_scales(weight, grid, config.search, scale_dtype, _column_costs(factor.upper, order))
    q = _solve(weight, factor.upper, order, (scale, zero), grid, config.block_size)
    return Solved(Quantized(q, scale, zero), damping=factor.damping)


def _column_costs(upper: Tensor, order: Tensor | None) -> Tensor:
    """What an error of each column costs [K] once the columns visited later have made up for it: U[j, j]^-2.

    Scales that are best under these costs are best for the solver: they clip where later columns can pay for it.
    """
    costs = upper.diagonal().square().reciprocal()
    return costs if order is None else torch.empty_like(costs).index_copy_(0, order, costs)


def _solve(
    weight: Tensor,
    upper: Tensor,
    order: Tensor | None,
    steps: tuple[Tensor, Tensor | None],
    grid: Grid,
    block_size: int,
) -> Tensor:
    """Integers int8 [N, K] for `weight` [N, K]: columns visited in `order`, scales and zero points [N, G] fixed."""
    rows, columns = weight.shape
    visit = torch.arange(columns, device=weight.device) if order is None else order
    scale = steps[0].T.float().contiguous()  # [G, N]: one contiguous row per group
    zero = None if steps[1] is None else steps[1].T.float().contiguous()
    group_of = (visit // (columns // len(scale))).tolist()
    integers = torch.empty(columns, rows, dtype=torch.int8, device=weight.device)

    def decide(j: int, values: Tensor) -> Tensor:
        group = group_of[j]
        q = values / scale[group]
        if zero is not None:
            q.add_(zero[group])
        q.round_().clamp_(grid.minimum, grid.maximum)
        integers[j] = q
        return (q if zero is None else q.sub_(zero[group])).mul_(scale[group])

    solve_columns(weight.T[visit], upper, decide, block_size)
    result = torch.empty_like(integers)
    result[visit] = integers
    return result.T.contiguous()
