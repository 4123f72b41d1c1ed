"""Scales against a loop over every group in float64, decibel floors on Gaussian weights, and the extremes of floats."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from compress.formats.grid import Grid, Quantized, dequantize
from compress.quantize import scales
from compress.quantize.scales import THOROUGH, Search, choose_scales, nearest, preview, round_to_grid

GRIDS = [Grid(4, True, 32), Grid(4, False, 32), Grid(8, True, 32), Grid(4, True), Grid(4, False)]


def gaussian(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def sqnr(weight: Tensor, quantized: Quantized) -> float:
    error = dequantize(quantized).double() - weight.double()
    return float(10 * torch.log10(weight.double().square().sum() / error.square().sum()))


def errors(values: list[float], scale: float, zero: int, grid: Grid) -> list[float]:
    """Squared rounding errors of one group, in Python floats."""
    integers = [min(max(round(value / scale) + zero, grid.minimum), grid.maximum) for value in values]
    return [(value - (integer - zero) * scale) ** 2 for value, integer in zip(values, integers, strict=True)]


def slow_choice(values: list[float], grid: Grid, search: Search, cost: list[float]) -> tuple[float, int]:
    """Least squared error of one group over all shrinks, scales in bfloat16, and the zero point that goes along."""
    low, high = min(0.0, *values), max(0.0, *values)
    if not grid.symmetric:
        step = (high - low) / (grid.maximum - grid.minimum)
    elif grid.bits == 8:
        step = max(high, -low) / 127
    else:
        upright, turned = max(high / 7, low / -8), max(-low / 7, high / 8)
        step = upright if upright <= turned else -turned
    step = torch.tensor(step).bfloat16().item()
    zero = 0 if grid.symmetric else round(grid.minimum - low / step)

    def loss(shrink: float) -> float:
        scale = torch.tensor(step * shrink).bfloat16().item()
        return sum(map(float.__mul__, errors(values, scale, zero, grid), cost))

    if search == "minmax":
        return loss(1.0), zero
    coarse = min(THOROUGH.coarse, key=loss)
    return min(loss(coarse + shift) for shift in (0.0, *THOROUGH.fine)), zero


@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
@pytest.mark.parametrize("search", ["minmax", "mse"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_scales_are_the_best_that_a_slow_search_finds(grid: Grid, search: Search, weighted: bool) -> None:
    weight = gaussian(3, 64) + 0.3
    cost = gaussian(1, 64, seed=1)[0].square() if weighted else None
    scale, zero = choose_scales(weight, grid, search, torch.bfloat16, cost)
    assert scale.dtype is torch.bfloat16 and scale.shape == (3, grid.groups(64))
    width = 64 // grid.groups(64)
    for row, group in itertools.product(range(3), range(grid.groups(64))):
        columns = slice(group * width, (group + 1) * width)
        values = weight[row, columns].tolist()
        costs = [1.0] * width if cost is None else cost[columns].tolist()
        best, expected_zero = slow_choice(values, grid, search, costs)
        chosen_zero = 0 if zero is None else int(zero[row, group])
        assert chosen_zero == expected_zero
        found = sum(map(float.__mul__, errors(values, scale[row, group].item(), chosen_zero, grid), costs))
        assert found == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_integers_are_the_nearest(grid: Grid) -> None:
    weight = gaussian(3, 64)
    scale, zero = choose_scales(weight, grid, "mse", torch.bfloat16)
    q = round_to_grid(weight, scale, zero, grid)
    assert q.dtype is torch.int8
    width = 64 // grid.groups(64)
    for row, column in itertools.product(range(3), range(64)):
        offset = 0 if zero is None else int(zero[row, column // width])
        points = [(v - offset) * scale[row, column // width].item() for v in range(grid.minimum, grid.maximum + 1)]
        distance = abs(points[int(q[row, column]) - grid.minimum] - weight[row, column].item())
        assert distance <= min(abs(point - weight[row, column].item()) for point in points) + 1e-6


@pytest.mark.parametrize(
    ("grid", "minmax", "mse"),
    [
        (Grid(4, True, 32), 21.1, 21.6),
        (Grid(4, True, 64), 20.2, 20.8),
        (Grid(4, True, 128), 19.4, 20.2),
        (Grid(4, True), 17.2, 19.2),
        (Grid(4, False, 32), 21.7, 22.1),
        (Grid(4, False, 128), 19.8, 20.4),
        (Grid(8, True, 128), 43.6, 43.7),
        (Grid(8, True), 41.6, 41.7),
    ],
    ids=str,
)
def test_decibels_on_gaussian_weights(grid: Grid, minmax: float, mse: float) -> None:
    weight = gaussian(48, 1536)
    assert minmax < sqnr(weight, nearest(weight, grid, "minmax", torch.bfloat16)) < minmax + 0.5
    assert mse < sqnr(weight, nearest(weight, grid, "mse", torch.bfloat16)) < mse + 0.5


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_searching_never_loses_in_any_group(grid: Grid) -> None:
    weight = gaussian(16, 64).pow(3)
    squares = [
        (dequantize(nearest(weight, grid, search, torch.bfloat16)) - weight)
        .square()
        .view(16, grid.groups(64), -1)
        .sum(-1)
        for search in ("minmax", "mse")
    ]
    assert (squares[1] <= squares[0] * (1 + 1e-5)).all()


@pytest.mark.parametrize("grid", [Grid(4, True, 32), Grid(8, True, 32)], ids=str)
def test_minmax_clips_nothing(grid: Grid) -> None:
    weight = gaussian(16, 64)
    quantized = nearest(weight, grid, "minmax", torch.float32)
    half_steps = quantized.scale.abs().repeat_interleave(32, dim=1) / 2
    assert ((dequantize(quantized) - weight).abs() <= half_steps * (1 + 1e-5)).all()


def test_the_sign_of_a_scale_turns_the_extreme_to_the_longer_side() -> None:
    weight = torch.tensor([[-0.5, 0.25, 4.0, 1.0], [-4.0, 0.25, 0.5, 1.0]])
    scale, _ = choose_scales(weight, Grid(4), "minmax", torch.float32)
    assert scale.tolist() == [[-0.5], [0.5]]
    assert round_to_grid(weight, scale, None, Grid(4))[:, [2, 0]].diagonal().tolist() == [-8, -8]
    assert (choose_scales(weight, Grid(8), "mse", torch.float32)[0] > 0).all()


def test_costs_of_zero_are_ignored() -> None:
    weight = gaussian(8, 64)
    weight[:, 0] = 100.0
    cost = torch.ones(64).index_fill(0, torch.tensor([0]), 0.0)
    scale, _ = choose_scales(weight, Grid(4, True, 64), "mse", torch.float32, cost)
    assert scale.abs().max() == pytest.approx(0.26 * 100 / 8, rel=1e-5)  # as far as the search shrinks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("search", ["minmax", "mse"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_any_finite_weight_gives_finite_results(grid: Grid, search: Search, dtype: torch.dtype) -> None:
    limit = torch.finfo(torch.float32)
    magnitudes = torch.tensor([0.0, limit.smallest_normal / 8, 1e-30, 1e-6, 1.0, 1e6, 1e30, limit.max])
    weight = magnitudes[:, None] * torch.linspace(-1, 1, 64)
    quantized = nearest(weight, grid, search, dtype)
    assert quantized.scale.dtype is dtype
    assert torch.isfinite(quantized.scale).all() and (quantized.scale != 0).all()
    assert torch.isfinite(dequantize(quantized)).all()
    assert (quantized.scale[0] == 1).all() and (dequantize(quantized)[0] == 0).all()
    assert sqnr(weight[4:5], Quantized(quantized.q[4:5], quantized.scale[4:5], _rows(quantized.zero, 4))) > 18


def _rows(zero: Tensor | None, row: int) -> Tensor | None:
    return None if zero is None else zero[row : row + 1]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_chunks_do_not_show(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = gaussian(7, 64)
    whole = choose_scales(weight, grid, "mse", torch.bfloat16)
    monkeypatch.setattr(scales, "_IN_CACHE", 128)
    parts = choose_scales(weight, grid, "mse", torch.bfloat16)
    assert torch.equal(whole[0], parts[0])
    assert whole[1] is None or torch.equal(whole[1], parts[1])  # type: ignore[arg-type]


def test_a_preview_is_close_to_what_rounding_gives() -> None:
    weight = gaussian(64, 256)
    error = (preview(weight, None, Grid(4, True, 64), "mse", torch.bfloat16) - weight).square().sum()
    exact = (dequantize(nearest(weight, Grid(4, True, 64), "mse", torch.bfloat16)) - weight).square().sum()
    assert exact <= error <= 1.1 * exact
