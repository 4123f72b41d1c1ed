"""What pruning is held against: masks by enumeration, and one column at a time in float64."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from compress.formats.grid import Grid
from compress.formats.pattern import Pattern
from compress.quantize.scales import choose_scales
from compress.stats import InputStats
from tests.test_solver import correlated_hessian

ROWS, COLUMNS = 24, 64
HALF, LARGER = Pattern(2, 4), Pattern(4, 8)
PATTERNS = pytest.mark.parametrize("pattern", [HALF, LARGER, Pattern(1, 4)], ids=str)


def weight() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))


def stats() -> InputStats:
    return InputStats(tokens=400, hessian=correlated_hessian(COLUMNS))


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
    once the columns before it are gone.
    """
    hessian = correlated_hessian(COLUMNS)
    h = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(COLUMNS).double()
    inverse, work = torch.linalg.inv(h), w.double().clone()
    left = torch.zeros(COLUMNS, dtype=torch.float64)
    rest = inverse.clone()
    for j in order:
        left[j] = rest[j, j]
        rest = rest - rest[:, j : j + 1] * rest[j : j + 1] / rest[j, j]
    scale = torch.ones(ROWS, 1)
    if grid is not None:
        alone, _ = slow_columns(w, pattern, order, None, damping)
        scale, _ = choose_scales(alone.float(), grid, "mse", torch.float32, (1 / left).float())
    size = COLUMNS // scale.shape[1]
    mask = torch.zeros(ROWS, COLUMNS, dtype=torch.bool)
    decided = torch.zeros_like(work)
    for place, j in enumerate(order):
        if place % pattern.of == 0:
            group = order[place : place + pattern.of]
            mask[:, group] = best_mask(work[:, group].square() / left[group], pattern)
        value = work[:, j] * mask[:, j]
        if grid is not None:
            s = scale[:, j // size].double()
            value = (value / s).round().clamp(grid.minimum, grid.maximum) * s
        decided[:, j] = value
        work -= ((work[:, j] - value) / inverse[j, j])[:, None] * inverse[j]
        inverse = inverse - inverse[:, j : j + 1] * inverse[j : j + 1] / inverse[j, j]
    return decided, mask


def visited(pattern: Pattern, activation_order: bool) -> list[int]:
    energy = correlated_hessian(COLUMNS).diagonal().view(-1, pattern.of).sum(1)
    groups = energy.argsort(descending=True).tolist() if activation_order else list(range(COLUMNS // pattern.of))
    return [group * pattern.of + column for group in groups for column in range(pattern.of)]
