"""Scales and zero points: the steps of the integer grid, chosen per group of input columns before any integer is.

Two searches. "minmax" takes the smallest step that clips nothing. "mse" shrinks that step, coarsely then finely, and
keeps, group by group, the one with the least squared rounding error: clipping a few extremes buys a finer step for all
the others (the weight clipping of AWQ, arXiv 2306.00978, as a plain search).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from compress.formats.grid import Grid, Quantized, dequantize

Search = Literal["minmax", "mse"]


class Shrinks(NamedTuple):
    """Multiples of the step that clips nothing: `coarse` are tried first, then the best of them plus each of `fine`."""

    coarse: tuple[float, ...]
    fine: tuple[float, ...]


THOROUGH = Shrinks(tuple(1 - 0.05 * i for i in range(15)), tuple(0.01 * i for i in (-4, -3, -2, -1, 1, 2, 3, 4)))
QUICK = Shrinks(tuple(1 - 0.1 * i for i in range(6)), ())
_IN_CACHE = 1 << 18  # weights searched at a time: every shrink reads them again, so on a CPU they must stay near
_ON_DEVICE = 1 << 24


def choose_scales(
    weight: Tensor,
    grid: Grid,
    search: Search,
    scale_dtype: torch.dtype,
    cost: Tensor | None = None,
    shrinks: Shrinks = THOROUGH,
) -> tuple[Tensor, Tensor | None]:
    """Scale [N, G] in `scale_dtype` and, on an asymmetric grid, zero point int8 [N, G] for `weight` float32 [N, K].

    Scales are rounded to `scale_dtype` before they are judged, so that what is stored is what was chosen. They are
    finite and not zero for any finite weight; a group of zeros gets 1. On a symmetric grid of less than 8 bits a scale
    may be negative: the integers reach one further down than up, and the sign turns the group's extreme that way.

    cost: [K], what a squared error costs in each column, None for the same in all; for "mse" alone. A solver that lets
    later columns make up for earlier ones pays by the pivots of its factorization, not by the Hessian's diagonal.
    """
    rows, columns = weight.shape
    groups = grid.groups(columns)
    chunk = max(1, (_ON_DEVICE if weight.is_cuda else _IN_CACHE) // columns)
    cost = None if cost is None else cost.float().view(groups, -1)
    most = torch.finfo(torch.float32).max / (2 << grid.bits)  # so that no integer times its scale overflows
    scale = torch.empty(rows, groups, dtype=scale_dtype, device=weight.device)
    zero = None if grid.symmetric else torch.empty(rows, groups, dtype=torch.int8, device=weight.device)
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        values = weight[part].float().reshape(-1, groups, columns // groups)
        scale[part] = _storable(_clipless_steps(values, grid).clamp_(-most, most), scale_dtype)
        if zero is not None:
            # Fixed for the search as well: shrinking both ends of a range by the same factor leaves it where it is.
            zero[part] = _zero_points(values, scale[part].float(), grid)
        if search == "mse":
            offset = values.new_zeros(1) if zero is None else zero[part].unsqueeze(-1)
            bounds = grid.minimum - offset.float(), grid.maximum - offset.float()
            scale[part] = _least_squares(values, scale[part], bounds, cost, shrinks)
    return scale, zero


def round_to_grid(weight: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid) -> Tensor:
    """The integers int8 [N, K] nearest to `weight` float32 [N, K] under `scale` [N, G] and `zero` int8 [N, G]."""
    rows, columns = weight.shape
    values = (weight.reshape(rows, scale.shape[1], -1) / scale.float().unsqueeze(-1)).round_()
    if zero is not None:
        values.add_(zero.unsqueeze(-1))
    return values.clamp_(grid.minimum, grid.maximum).to(torch.int8).view(rows, columns)


def nearest(weight: Tensor, grid: Grid, search: Search, scale_dtype: torch.dtype) -> Quantized:
    """`weight` float32 [N, K], every value rounded to the nearest point of `grid` under scales from `search`."""
    scale, zero = choose_scales(weight, grid, search, scale_dtype)
    return Quantized(round_to_grid(weight, scale, zero, grid), scale, zero)


def preview(weight: Tensor, cost: Tensor | None, grid: Grid, search: Search, scale_dtype: torch.dtype) -> Tensor:
    """About what rounding to nearest makes of `weight` [N, K], by a coarse search: for transforms that price scales."""
    scale, zero = choose_scales(weight, grid, search, scale_dtype, cost, QUICK)
    return dequantize(Quantized(round_to_grid(weight, scale, zero, grid), scale, zero))


def _clipless_steps(values: Tensor, grid: Grid) -> Tensor:
    """The smallest step [n, G] that clips nothing of `values` [n, G, g]; its sign is the better way round."""
    low, high = values.amin(-1).clamp_(max=0), values.amax(-1).clamp_(min=0)
    if not grid.symmetric:
        # Divided before they meet: the distance of two finite numbers need not be finite.
        return high / (grid.maximum - grid.minimum) - low / (grid.maximum - grid.minimum)
    if grid.bits >= 8:  # One more level among 256 is worth 0.07 dB, which is not worth a surprising sign.
        return torch.maximum(high, -low) / grid.maximum
    upright = torch.maximum(high / grid.maximum, low / grid.minimum)
    turned = torch.maximum(-low / grid.maximum, -high / grid.minimum)
    return torch.where(upright <= turned, upright, -turned)


def _storable(steps: Tensor, dtype: torch.dtype) -> Tensor:
    """`steps` in `dtype`: 0 becomes 1, and nothing else becomes 0 or infinite."""
    limits = torch.finfo(dtype)
    magnitude = steps.abs().clamp_(limits.tiny, limits.max)
    return torch.where(steps == 0, torch.ones_like(steps), magnitude.copysign_(steps)).to(dtype)


def _zero_points(values: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """The integers [n, G] that stand for 0 where the least of `values` [n, G, g] falls on the grid's minimum."""
    low = values.amin(-1).clamp_(max=0)
    return (grid.minimum - low / scale).round_().clamp_(grid.minimum, grid.maximum)


def _least_squares(
    values: Tensor, full: Tensor, bounds: tuple[Tensor, Tensor], cost: Tensor | None, shrinks: Shrinks
) -> Tensor:
    """The shrunken step [n, G] in the dtype of `full` whose rounding of `values` [n, G, g] errs least.

    bounds: the least and greatest multiples of the step on the grid, broadcastable to [n, G, g]. cost: [G, g].
    Squared errors are compared in units of the `full` step [n, G], so that none overflows or vanishes.
    """
    unit = full.float()
    best, least = torch.ones_like(unit), torch.full_like(unit, torch.inf)
    multiples, rounded = torch.empty_like(values), torch.empty_like(values)
    for around, phase in ((0, shrinks.coarse), (1, shrinks.fine)):
        middle = best * around
        for offset in phase:
            shrink = middle + offset
            scale = _storable(unit * shrink, full.dtype).float()
            torch.div(values, scale.unsqueeze(-1), out=multiples)
            torch.round(multiples, out=rounded).clamp_(*bounds)
            error = multiples.sub_(rounded)
            weighted = error if cost is None else torch.mul(error, cost, out=rounded)
            loss = torch.linalg.vecdot(error, weighted).mul_((scale / unit).square_())
            best = torch.where(loss < least, shrink, best)
            least = torch.minimum(loss, least)
    return _storable(unit * best, full.dtype)
