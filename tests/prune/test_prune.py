"""Pruning against slow oracles: masks by enumeration, SparseGPT and its joint pass with GPTQ one column at a time."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from compress.formats.grid import Grid, dequantize
from compress.formats.pattern import Pattern, follows, keep_largest
from compress.prune import magnitude, sparsegpt, wanda
from compress.quantize import gptq
from compress.quantize.scales import choose_scales
from compress.stats import InputStats, StatsAccumulator
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


@PATTERNS
def test_magnitude_keeps_the_largest(pattern: Pattern) -> None:
    pruned = magnitude.prune(weight(), None, pattern, magnitude.Config(), torch.bfloat16)
    assert torch.equal(pruned.mask, best_mask(weight().abs(), pattern))
    assert torch.equal(pruned.weight, weight() * pruned.mask)


@PATTERNS
def test_wanda_weighs_by_the_input(pattern: Pattern) -> None:
    x = torch.randn(50, COLUMNS, generator=torch.Generator().manual_seed(5)) * torch.linspace(0.1, 4, COLUMNS)
    seen = StatsAccumulator("layer", wanda.NEEDS)
    seen.add(x[:20])
    seen.add(x[20:])
    pruned = wanda.prune(weight(), seen.result(), pattern, wanda.Config(), torch.bfloat16)
    assert torch.equal(pruned.mask, best_mask(weight().abs() * x.norm(dim=0), pattern))
    assert torch.equal(pruned.weight, weight() * pruned.mask)


def test_ties_keep_as_many() -> None:
    assert torch.equal(keep_largest(torch.zeros(1, 8), HALF), torch.tensor([[True, True, False, False] * 2]))
    assert not follows(torch.ones(1, 8, dtype=torch.bool), HALF) and not follows(torch.ones(1, 6).bool(), HALF)


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


@PATTERNS
@pytest.mark.parametrize("activation_order", [True, False])
@pytest.mark.parametrize("block_size", [16, 128])
def test_sparsegpt_agrees_with_the_slow_oracle(pattern: Pattern, activation_order: bool, block_size: int) -> None:
    config = sparsegpt.Config(activation_order=activation_order, block_size=block_size)
    pruned = sparsegpt.prune(weight(), stats(), pattern, config, torch.float32)
    oracle, mask = slow_columns(weight(), pattern, visited(pattern, activation_order), None, config.damping)
    assert torch.equal(pruned.mask, mask) and follows(pruned.mask, pattern)
    assert float((pruned.weight - oracle).abs().max()) < 1e-5
    assert loss(weight(), pruned.weight) == pytest.approx(loss(weight(), oracle), rel=1e-5)
    assert not bool(pruned.weight[~pruned.mask].any())


@PATTERNS
@pytest.mark.parametrize("activation_order", [True, False])
def test_the_joint_pass_agrees_with_the_slow_oracle(pattern: Pattern, activation_order: bool) -> None:
    grid, config = Grid(4, True, 32), gptq.Config(activation_order=activation_order)
    solved = gptq.quantize(weight(), stats(), grid, config, torch.float32, pattern)
    mine = dequantize(solved.quantized)
    oracle, mask = slow_columns(weight(), pattern, visited(pattern, activation_order), grid, config.damping)
    assert solved.quantized.mask is not None and follows(solved.quantized.mask, pattern)
    # A value at a tie may be rounded the other way in float32, and what follows then differs: the loss is the same.
    assert float((solved.quantized.mask == mask).float().mean()) > 0.98
    assert loss(weight(), mine) == pytest.approx(loss(weight(), oracle.float()), rel=0.02)
    assert not bool(solved.quantized.q[~solved.quantized.mask].any())


def test_each_method_loses_less_than_the_one_before() -> None:
    """On inputs of unlike size, as those of language models are; floors in shares of the signal."""
    size = torch.logspace(-1, 1, COLUMNS)[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))]
    hessian = correlated_hessian(COLUMNS) * size * size[:, None]
    seen = InputStats(400, mean_square=hessian.diagonal(), hessian=hessian)
    losses = []
    for method in (sparsegpt, wanda, magnitude):
        decided = method.prune(weight(), seen, HALF, method.Config(), torch.float32).weight
        error = weight() - decided
        losses.append(float(((error @ hessian) * error).sum() / ((weight() @ hessian) * weight()).sum()))
    assert losses == sorted(losses), losses
    assert losses[0] < 0.05 and losses[0] < 0.9 * losses[1] < 0.5 * losses[2], losses


def test_a_joint_pass_loses_less_than_two() -> None:
    grid, config = Grid(4, True, 32), gptq.Config()
    joint = gptq.quantize(weight(), stats(), grid, config, torch.float32, HALF)
    pruned = sparsegpt.prune(weight(), stats(), HALF, sparsegpt.Config(), torch.float32)
    after = gptq.quantize(pruned.weight, stats(), grid, config, torch.float32, pruned.mask)
    assert torch.equal(after.quantized.mask, pruned.mask)  # type: ignore[arg-type]
    assert not bool(after.quantized.q[~pruned.mask].any())
    assert loss(weight(), dequantize(joint.quantized)) <= loss(weight(), dequantize(after.quantized))


def test_kept_values_are_rounded_as_they_are_stored() -> None:
    pruned = sparsegpt.prune(weight(), stats(), HALF, sparsegpt.Config(), torch.bfloat16)
    assert torch.equal(pruned.weight, pruned.weight.bfloat16().float())


def test_a_hessian_of_no_help() -> None:
    broken = InputStats(400, hessian=torch.full((COLUMNS, COLUMNS), torch.nan))
    pruned = sparsegpt.prune(weight(), broken, HALF, sparsegpt.Config(), torch.float32)
    assert pruned.fallback is not None and "magnitude" in pruned.fallback
    assert torch.equal(pruned.mask, best_mask(weight().abs(), HALF))
    solved = gptq.quantize(weight(), broken, Grid(4, True, 32), gptq.Config(), torch.float32, HALF)
    assert solved.fallback is not None and torch.equal(solved.quantized.mask, pruned.mask)  # type: ignore[arg-type]


@pytest.mark.parametrize(("method", "word"), [(wanda, "mean square"), (sparsegpt, "Hessian")])
def test_missing_statistics(method: object, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        method.prune(weight(), None, HALF, method.Config(), torch.float32)  # type: ignore[attr-defined]
