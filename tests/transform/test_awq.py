"""AWQ's search against slow loops, the price of errors under a compensating solver, and that it never loses."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch import Tensor

from compress.formats.grid import Grid, dequantize
from compress.quantize import gptq
from compress.quantize.scales import nearest, preview
from compress.stats import InputStats
from compress.transform import Rounding, awq, head_sources

GRID = Grid(4, True, 32)
DTYPE = torch.bfloat16
PREVIEW = partial(preview, grid=GRID, search="mse", scale_dtype=DTYPE)
TO_NEAREST = Rounding(PREVIEW)
COMPENSATED = Rounding(PREVIEW, damping=0.01)
CONFIG = awq.Config(grid_points=10)


def layer(seed: int = 0) -> tuple[list[Tensor], InputStats]:
    """Two weights and the statistics of their inputs: strongly correlated channels whose sizes differ fourfold."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(rows, 64, generator=generator) for rows in (48, 24)]
    latent = torch.randn(512, 8, generator=generator) @ torch.randn(8, 64, generator=generator)
    inputs = latent / 8**0.5 + 0.1 * torch.randn(512, 64, generator=generator)
    return weights, observed(inputs * torch.logspace(-0.3, 0.3, 64)[torch.randperm(64, generator=generator)])


def observed(inputs: Tensor) -> InputStats:
    return InputStats(
        tokens=len(inputs), mean_abs=inputs.abs().mean(0), hessian=inputs.T @ inputs / len(inputs), absmax=None
    )


def output_error(weights: list[Tensor], stats: InputStats, factors: Tensor) -> float:
    """The mean squared output error of rounding to nearest under `factors`, row by row in float64."""
    assert stats.hessian is not None
    total = 0.0
    for weight in weights:
        error = (PREVIEW(weight * factors, None) / factors - weight).double()
        for row in error:
            total += float(row @ stats.hessian.double() @ row)
    return total


def solver_error(weights: list[Tensor], stats: InputStats, factors: Tensor) -> float:
    """The same of GPTQ."""
    assert stats.hessian is not None
    total = 0.0
    for weight in weights:
        solved = gptq.quantize(weight * factors, stats.scaled(factors), GRID, gptq.Config(), DTYPE)
        error = dequantize(solved.quantized) / factors - weight
        total += float(((error @ stats.hessian) * error).sum())
    return total


def slow_factors(weights: list[Tensor], stats: InputStats, a: float, b: float) -> Tensor:
    """mean|x|^a / rms(w)^b with geometric mean 1, channel by channel."""
    assert stats.mean_abs is not None
    factors = []
    for k in range(64):
        mean_square = sum(float(weight[:, k].double().square().mean()) for weight in weights) / len(weights)
        factors.append(stats.mean_abs[k].double() ** a / mean_square ** (b / 2))
    result = torch.stack(factors)
    return (result / result.log().mean().exp()).float()


def test_the_best_exponents_of_a_slow_search() -> None:
    weights, stats = layer()
    factors = awq.scale(weights, stats, TO_NEAREST, CONFIG)
    points = [point / 10 for point in range(10)]
    losses = {(a, a): output_error(weights, stats, slow_factors(weights, stats, a, a)) for a in points}
    best = min(losses, key=lambda exponents: losses[exponents])
    losses |= {(best[0], b): output_error(weights, stats, slow_factors(weights, stats, best[0], b)) for b in points}
    best = min(losses, key=lambda exponents: losses[exponents])
    assert best[0] > 0
    assert torch.allclose(factors, slow_factors(weights, stats, *best), rtol=1e-3)
    assert output_error(weights, stats, factors) == pytest.approx(losses[best], rel=1e-3)


def test_rounding_to_nearest_gains() -> None:
    ratios = []
    for seed in range(4):
        weights, stats = layer(seed)
        factors = awq.scale(weights, stats, TO_NEAREST, CONFIG)
        ratios.append(output_error(weights, stats, factors) / output_error(weights, stats, torch.ones(64)))
    assert max(ratios) < 1 and sum(ratios) / 4 < 0.9


def test_gptq_gains_only_from_factors_priced_for_it() -> None:
    """Factors that are best for rounding to nearest make GPTQ worse than none: they spoil what correlation offers.

    GPTQ's own scales are chosen under the same costs, so what is left to gain for factors is small on such layers.
    """
    behind, wrong = [], []
    for seed in range(16):
        weights, stats = layer(seed)
        alone = solver_error(weights, stats, torch.ones(64))
        behind.append(solver_error(weights, stats, awq.scale(weights, stats, COMPENSATED, CONFIG)) / alone)
        wrong.append(solver_error(weights, stats, awq.scale(weights, stats, TO_NEAREST, CONFIG)) / alone)
    assert max(behind) < 1.06 and sum(behind) / 16 < 0.99
    assert sum(wrong) / 16 > 1.2


def test_pivots_are_what_later_channels_cannot_explain() -> None:
    stats = layer()[1]
    assert stats.hessian is not None and stats.mean_abs is not None
    pivots, sizes = awq._cost_of_errors(stats.hessian, stats.mean_abs, 0.01)
    hessian = stats.hessian.double()
    hessian = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(64)
    order = stats.hessian.diagonal().argsort(descending=True).tolist()
    for place, k in enumerate(order):
        later = order[place + 1 :]
        explained = hessian[k, later] @ torch.linalg.solve(hessian[later][:, later], hessian[later, k]) if later else 0
        assert pivots[k].item() == pytest.approx(float(hessian[k, k] - explained), rel=1e-3)
    assert torch.equal(sizes, pivots.sqrt())


def test_pivots_predict_the_loss_of_gptq() -> None:
    weights, stats = layer()
    assert stats.hessian is not None and stats.mean_abs is not None
    pivots, _ = awq._cost_of_errors(stats.hessian, stats.mean_abs, 0.01)
    error = dequantize(nearest(weights[0], GRID, "minmax", DTYPE)) - weights[0]
    predicted = float((error.square() @ pivots).sum())
    solved = gptq.quantize(weights[0], stats, GRID, gptq.Config(search="minmax"), DTYPE)
    error = dequantize(solved.quantized) - weights[0]
    damped = stats.hessian + 0.01 * stats.hessian.diagonal().mean() * torch.eye(64)
    assert predicted == pytest.approx(float(((error @ damped) * error).sum()), rel=0.1)


@pytest.mark.parametrize("rounding", [TO_NEAREST, COMPENSATED], ids=["nearest", "compensated"])
def test_dead_channels_keep_factor_one(rounding: Rounding) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(16, 64, generator=generator)]
    inputs = torch.randn(256, 64, generator=generator) * torch.logspace(-1, 1, 64)
    inputs[:, [3, 50]] = 0
    weights[0][:, 20] = 0
    factors = awq.scale(weights, observed(inputs), rounding, CONFIG)
    assert (factors[[3, 20, 50]] == 1).all() and factors.std() > 0
    assert torch.isfinite(factors).all() and (factors > 1e-2).all() and (factors < 1e2).all()
    assert factors.log().mean().item() == pytest.approx(0.0, abs=1e-5)


def test_nothing_to_go_by_changes_nothing() -> None:
    weights = [torch.randn(16, 64, generator=torch.Generator().manual_seed(0))]
    silent = InputStats(tokens=1, mean_abs=torch.zeros(64), hessian=torch.zeros(64, 64))
    for rounding in (TO_NEAREST, COMPENSATED):
        assert torch.equal(awq.scale(weights, silent, rounding, CONFIG), torch.ones(64))
    assert torch.equal(awq.scale([torch.zeros(16, 64)], layer()[1], TO_NEAREST, CONFIG), torch.ones(64))


def test_columns_of_one_output_share_a_factor() -> None:
    weights, stats = layer()
    for rounding in (TO_NEAREST, COMPENSATED):
        heads = awq.scale(weights, stats, rounding, CONFIG, head_sources(64, repeat=2, head_size=8)).view(4, 2, 8)
        assert torch.allclose(heads[:, 0], heads[:, 1], rtol=1e-6)
        assert heads.std() > 0


def test_a_sample_of_rows_prices_like_all_of_them() -> None:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(300, 64, generator=generator)]
    stats = layer()[1]
    for rows, counts in itertools.product((300, 100, 7), [(300, 100, 7)]):
        sample = awq._spread(weights[0], rows)
        assert rows / 2 < len(sample) <= rows and len(sample) in (*counts, 6)
    few = awq.scale(weights, stats, TO_NEAREST, awq.Config(grid_points=10, rows=100))
    every = awq.scale(weights, stats, TO_NEAREST, awq.Config(grid_points=10, rows=300))
    assert output_error(weights, stats, few) < 1.05 * output_error(weights, stats, every)


def test_refuses_without_a_stage_behind_it_or_statistics() -> None:
    weights, stats = layer()
    with pytest.raises(ValueError, match="quantize stage"):
        awq.scale(weights, stats, None, CONFIG)
    with pytest.raises(ValueError, match="Hessian"):
        awq.scale(weights, InputStats(tokens=1), TO_NEAREST, CONFIG)
    assert sorted(awq.NEEDS) == ["hessian", "mean_abs"]
