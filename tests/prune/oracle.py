"""What pruning is held against: masks by enumeration, and one column at a time in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import Tensor

from compress.formats.grid import Grid
from compress.formats.pattern import Pattern
from compress.quantize import gptq
from compress.quantize.scales import choose_scales
from compress.stats import InputStats
from tests.test_solver import correlated_hessian

ROWS, COLUMNS = 24, 64
HALF, LARGER = Pattern(2, 4), Pattern(4, 8)
PATTERNS = pytest.mark.parametrize("pattern", [HALF, LARGER, Pattern(1, 4)], ids=str)


def weight() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))


def stats(dtype: torch.dtype = torch.float32) -> InputStats:
    return InputStats(tokens=400, hessian=correlated_hessian(COLUMNS).to(dtype))


def loss(w: Tensor, decided: Tensor) -> float:
    error, hessian = (w - decided).double(), correlated_hessian(COLUMNS).double()
    return float(((error @ hessian) * error).sum())


def best_mask(scores: Tensor, pattern: Pattern) -> Tensor:
    """The mask that keeps most of `scores`, found by trying all of a group's."""
    mask = torch.zeros_like(scores, dtype=torch.bool)
    for row in range(scores.shape[0]):
        for start in range(0, scores.shape[1], pattern.of):
            group = scores[row, start : start + pattern.of]
            kept = max(
                combinations(range(pattern.of), pattern.keep), key=lambda chosen: float(group[list(chosen)].sum())
            )
            mask[row, [start + column for column in kept]] = True
    return mask


def slow_columns(
    w: Tensor, pattern: Pattern, order: list[int], grid: Grid | None, damping: float
) -> tuple[Tensor, Tensor]:
    """One column at a time in float64, H^-1 eliminated explicitly: decided weight [N, K] and mask.

    A group's mask is chosen when its first column is reached, by w^2 over what H^-1 has left of each column's diagonal
    once the columns before it are gone. With a grid, what is kept is refitted before scales are chosen for it, and is
    rounded in a second pass under its mask.
    """
    left = _pivots(damping, order)
    mask = torch.zeros(ROWS, COLUMNS, dtype=torch.bool)

    def prune(place: int, work: Tensor) -> Tensor:
        if place % pattern.of == 0:
            group = order[place : place + pattern.of]
            mask[:, group] = best_mask(work[:, group].square() / left[group], pattern)
        return work[:, order[place]] * mask[:, order[place]]

    pruned = _eliminated(w.double(), damping, order, prune)
    if grid is None:
        return pruned, mask
    kept = slow_refit(w.double(), pruned, mask, damping, gptq.REFITS)
    scale, _ = choose_scales(kept, grid, "mse", torch.float32, 1 / left)
    size = COLUMNS // scale.shape[1]

    def rounded(place: int, work: Tensor) -> Tensor:
        j = order[place]
        s = scale[:, j // size].double()
        return (work[:, j] * mask[:, j] / s).round().clamp(grid.minimum, grid.maximum) * s

    return _eliminated(kept, damping, order, rounded), mask


def slow_refit(w: Tensor, pruned: Tensor, mask: Tensor, damping: float, sweeps: int) -> Tensor:
    """Every kept weight in turn moved to where the error, all others as they stand, is least: the root of a parabola's
    slope, the slope taken from scratch."""
    damped, fitted = _damped(damping), pruned.clone()
    for _ in range(sweeps):
        for j in range(COLUMNS):
            slope = (w - fitted) @ damped[:, j]
            fitted[:, j] += mask[:, j] * slope / damped[j, j]
    return fitted


def _damped(damping: float) -> Tensor:
    hessian = correlated_hessian(COLUMNS).double()
    return hessian + damping * hessian.diagonal().mean() * torch.eye(COLUMNS).double()


def _pivots(damping: float, order: list[int]) -> Tensor:
    """What H^-1 has left of each column's diagonal once the columns before it are gone."""
    rest = torch.linalg.inv(_damped(damping))
    left = torch.zeros(COLUMNS, dtype=torch.float64)
    for j in order:
        left[j] = rest[j, j]
        rest = rest - rest[:, j : j + 1] * rest[j : j + 1] / rest[j, j]
    return left


def _eliminated(w: Tensor, damping: float, order: list[int], decide: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The weight [N, K] after every column was decided by decide(place in order, weight as it stands then)."""
    inverse, work = torch.linalg.inv(_damped(damping)), w.clone()
    decided = torch.zeros_like(work)
    for place, j in enumerate(order):
        decided[:, j] = decide(place, work)
        work -= ((work[:, j] - decided[:, j]) / inverse[j, j])[:, None] * inverse[j]
        inverse = inverse - inverse[:, j : j + 1] * inverse[j : j + 1] / inverse[j, j]
    return decided


def visited(pattern: Pattern, activation_order: bool) -> list[int]:
    energy = correlated_hessian(COLUMNS).diagonal().view(-1, pattern.of).sum(1)
    groups = energy.argsort(descending=True).tolist() if activation_order else list(range(COLUMNS // pattern.of))
    return [group * pattern.of + column for group in groups for column in range(pattern.of)]
