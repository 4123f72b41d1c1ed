"""GPTQ against a slow oracle, with floors in dB, and what it does where the Hessian is no help."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from compress.formats.grid import Grid, dequantize
from compress.quantize import gptq, rtn
from compress.quantize.gptq import Config
from compress.quantize.scales import choose_scales
from compress.stats import InputStats
from tests.test_solver import correlated_hessian

ROWS, COLUMNS = 24, 64


def stats(hessian: Tensor) -> InputStats:
    return InputStats(tokens=400, hessian=hessian)


def weight() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))


def output_db(w: Tensor, decided: Tensor, hessian: Tensor) -> float:
    error = (w - decided).double()
    signal, noise = ((w.double() @ hessian.double()) * w).sum(), ((error @ hessian.double()) * error).sum()
    return 10 * math.log10(float(signal / noise))


def slow_gptq(w: Tensor, hessian: Tensor, grid: Grid, config: Config) -> Tensor:
    """One column at a time in float64, H^-1 eliminated explicitly, columns by falling diagonal, static groups.

    The costs under which scales are chosen are the Schur complements: what is left of a column's diagonal once the
    columns visited later have explained what they can.
    """
    work = w.double().clone()
    h = hessian.double() + config.damping * hessian.double().diagonal().mean() * torch.eye(COLUMNS).double()
    inverse = torch.linalg.inv(h)
    order = hessian.diagonal().argsort(descending=True) if config.activation_order else torch.arange(COLUMNS)
    costs = torch.zeros(COLUMNS, dtype=torch.float64)
    for position, j in enumerate(order.tolist()):
        later = order[position + 1 :]
        explained = h[j, later] @ torch.linalg.solve(h[later][:, later], h[later, j]) if len(later) else 0.0
        costs[j] = h[j, j] - explained
    scale, zero = choose_scales(w, grid, config.search, torch.float32, costs.float())
    size = COLUMNS // scale.shape[1]
    result = torch.zeros_like(work)
    for j in order.tolist():
        s = scale[:, j // size].double()
        z = torch.zeros(ROWS) if zero is None else zero[:, j // size].double()
        q = (work[:, j] / s + z).round().clamp(grid.minimum, grid.maximum)
        result[:, j] = (q - z) * s
        error = (work[:, j] - result[:, j]) / inverse[j, j]
        work -= error[:, None] * inverse[j]
        inverse = inverse - inverse[:, j : j + 1] * inverse[j : j + 1] / inverse[j, j]
    return result


@pytest.mark.parametrize("grid", [Grid(4, True, 32), Grid(4, False, 16), Grid(4), Grid(8, True, 32)], ids=str)
@pytest.mark.parametrize("activation_order", [True, False])
def test_agrees_with_the_slow_oracle(grid: Grid, activation_order: bool) -> None:
    hessian, config = correlated_hessian(COLUMNS), Config(activation_order=activation_order)
    solved = gptq.quantize(weight(), stats(hessian), grid, config, torch.float32)
    mine = dequantize(solved.quantized)
    oracle = slow_gptq(weight(), hessian, grid, config).float()
    # float32 may round a value at a tie the other way, which then spreads: nearly all agree, and the loss is the same.
    assert float((mine - oracle).abs().lt(1e-6).float().mean()) > 0.95
    assert output_db(weight(), mine, hessian) == pytest.approx(output_db(weight(), oracle, hessian), abs=0.1)
    assert solved.damping == config.damping and solved.fallback is None
    wide = gptq.quantize(weight().double(), stats(hessian.double()), grid, config, torch.float32)
    assert torch.equal(dequantize(wide.quantized), oracle), "in float64 no value falls to the other side"


def test_floor_in_decibels() -> None:
    hessian = correlated_hessian(COLUMNS)
    grid = Grid(4, True, 32)
    mine = dequantize(gptq.quantize(weight(), stats(hessian), grid, Config(), torch.bfloat16).quantized)
    nearest = dequantize(rtn.quantize(weight(), None, grid, rtn.Config(), torch.bfloat16).quantized)
    assert output_db(weight(), mine, hessian) > 22.0
    assert output_db(weight(), mine, hessian) > output_db(weight(), nearest, hessian) + 1.5


def test_uncorrelated_inputs_leave_rounding_to_nearest() -> None:
    grid = Grid(4, True, 32)
    solved = gptq.quantize(weight(), stats(torch.eye(COLUMNS)), grid, Config(), torch.bfloat16).quantized
    nearest = rtn.quantize(weight(), None, grid, rtn.Config(), torch.bfloat16).quantized
    assert torch.equal(solved.q, nearest.q)


def test_dead_channels_keep_their_weights() -> None:
    hessian = correlated_hessian(COLUMNS)
    hessian[5], hessian[:, 5] = 0, 0
    solved = gptq.quantize(weight(), stats(hessian), Grid(8, True, 32), Config(), torch.float32).quantized
    assert torch.allclose(dequantize(solved)[:, 5], weight()[:, 5], atol=0.02)


def test_hopeless_hessian_falls_back_and_says_so() -> None:
    hopeless = torch.eye(COLUMNS)
    hopeless[0, 1] = hopeless[1, 0] = 50.0
    solved = gptq.quantize(weight(), stats(hopeless), Grid(4, True, 32), Config(), torch.bfloat16)
    assert solved.damping is None and solved.fallback is not None and "rounded to nearest" in solved.fallback
    nearest = rtn.quantize(weight(), None, Grid(4, True, 32), rtn.Config(), torch.bfloat16).quantized
    assert torch.equal(solved.quantized.q, nearest.q)
    with pytest.raises(ValueError, match="needs the Hessian"):
        gptq.quantize(weight(), None, Grid(4, True, 32), Config(), torch.bfloat16)
