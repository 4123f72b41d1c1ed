"""SmoothQuant's factors against the paper's formula, and what they win on inputs with outlier channels."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from compress.formats.grid import Grid, dequantize
from compress.quantize.scales import nearest
from compress.stats import InputStats
from compress.transform import head_sources, smoothquant


def layer() -> tuple[list[Tensor], Tensor]:
    """Two weights and their shared inputs [128, 64] with two outlier channels."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(rows, 64, generator=generator) for rows in (32, 16)]
    inputs = torch.randn(128, 64, generator=generator)
    inputs[:, [5, 30]] *= torch.tensor([30.0, 60.0])
    return weights, inputs


def observed(inputs: Tensor) -> InputStats:
    return InputStats(tokens=len(inputs), absmax=inputs.abs().amax(0))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_factors_follow_equation_4(alpha: float) -> None:
    weights, inputs = layer()
    factors = smoothquant.scale(weights, observed(inputs), None, smoothquant.Config(alpha=alpha))
    for k in range(64):
        most_x = max(abs(x) for x in inputs[:, k].tolist())
        most_w = max(abs(w) for weight in weights for w in weight[:, k].tolist())
        assert factors[k].item() == pytest.approx(most_x**alpha / most_w ** (1 - alpha), rel=1e-5)


def per_token(inputs: Tensor) -> Tensor:
    """Inputs rounded to int8 with one absmax scale per token."""
    step = inputs.abs().amax(1, keepdim=True) / 127
    return (inputs / step).round() * step


def test_w8a8_gains_decibels() -> None:
    weights, inputs = layer()
    exact = inputs @ weights[0].T
    factors = smoothquant.scale(weights, observed(inputs), None, smoothquant.Config())
    decibels = []
    for s in (torch.ones(64), factors):
        weight = dequantize(nearest(weights[0] * s, Grid(8), "minmax", torch.float32))
        error = per_token(inputs / s) @ weight.T - exact
        decibels.append(float(10 * torch.log10(exact.square().sum() / error.square().sum())))
    assert torch.allclose((inputs / factors) @ (weights[0] * factors).T, exact, rtol=1e-4, atol=1e-3)
    assert decibels[1] > 38 and decibels[1] > decibels[0] + 5


def test_dead_channels_keep_factor_one_and_all_are_finite() -> None:
    weights, inputs = layer()
    inputs[:, 7] = 0
    inputs[:, 8] = 1e-30
    for weight in weights:
        weight[:, 9] = 0
    factors = smoothquant.scale(weights, observed(inputs), None, smoothquant.Config())
    assert factors[7] == 1 and factors[9] == 1
    assert torch.isfinite(factors).all() and (factors > 0).all()


def test_columns_of_one_output_share_a_factor() -> None:
    weights, inputs = layer()
    sources = head_sources(64, repeat=2, head_size=8)
    factors = smoothquant.scale(weights, observed(inputs), None, smoothquant.Config(), sources)
    heads = factors.view(4, 2, 8)
    assert torch.equal(heads[:, 0], heads[:, 1])


def test_settings() -> None:
    assert sorted(smoothquant.NEEDS) == ["absmax"] and smoothquant.Config().alpha == 0.5
    with pytest.raises(ValidationError):
        smoothquant.Config(alpha=1.5)
    with pytest.raises(ValueError, match="greatest magnitudes"):
        smoothquant.scale(layer()[0], InputStats(tokens=1), None, smoothquant.Config())
