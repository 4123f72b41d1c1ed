"""LLM.int8() with static columns: the criterion, a float64 oracle of the decomposition, and injected outliers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.formats.grid import Grid, Quantized, dequantize
from compress.quantize import llm_int8
from compress.stats import InputStats

OUTLIERS = [3, 17, 40]


def layer() -> tuple[Tensor, Tensor]:
    """A weight [48, 64] and inputs [256, 64] with OUTLIERS scaled up 20 to 60 and their weights down as much."""
    generator = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(48, 64, generator=generator), torch.randn(256, 64, generator=generator)
    factors = torch.tensor([20.0, 40.0, 60.0])
    weight[:, OUTLIERS] /= factors
    inputs[:, OUTLIERS] *= factors
    return weight, inputs


def shares(inputs: Tensor) -> InputStats:
    return InputStats(tokens=len(inputs), outlier_share=(inputs.abs() >= 6.0).float().mean(0))


def slow_output(inputs: Tensor, quantized: Quantized) -> Tensor:
    """Section 3.2 token by token in float64: absmax int8 of the regular part, the outlier columns as they are."""
    columns = [] if quantized.outlier_columns is None else quantized.outlier_columns.tolist()
    output = torch.zeros(len(inputs), len(quantized.q), dtype=torch.float64)
    for token, x in enumerate(inputs.double()):
        regular = x.clone()
        regular[columns] = 0
        step = regular.abs().max() / 127
        integers = torch.round(regular / step)
        output[token] = (quantized.q.double() @ integers) * step * quantized.scale[:, 0].double()
        if quantized.outlier_weight is not None:
            output[token] += quantized.outlier_weight.double() @ x[columns]
    return output


def test_columns_found_and_decomposed() -> None:
    weight, inputs = layer()
    solved = llm_int8.quantize(weight, shares(inputs), Grid(8), llm_int8.Config(), torch.bfloat16)
    quantized = solved.quantized
    assert quantized.outlier_columns is not None and quantized.outlier_weight is not None
    assert quantized.outlier_columns.dtype is torch.int32 and quantized.outlier_columns.tolist() == OUTLIERS
    assert torch.equal(quantized.outlier_weight, weight[:, OUTLIERS].bfloat16())
    assert (quantized.q[:, OUTLIERS] == 0).all()
    for row in range(48):
        values = [weight[row, column].item() for column in range(64) if column not in OUTLIERS]
        scale = torch.tensor(max(map(abs, values)) / 127).bfloat16().item()
        assert quantized.scale[row, 0].item() == scale
        q = [int(quantized.q[row, column]) for column in range(64) if column not in OUTLIERS]
        assert q == [round(value / scale) for value in values]
    assert solved.fallback is None


def test_outliers_cost_plain_int8_dear_and_the_decomposition_nothing() -> None:
    weight, inputs = layer()
    exact = inputs.double() @ weight.double().T
    stats = shares(inputs)
    decibels = []
    for share in (0.06, 1.0):  # at 1.0 not even an outlier channel qualifies
        config = llm_int8.Config(share=share)
        quantized = llm_int8.quantize(weight, stats, Grid(8), config, torch.bfloat16).quantized
        error = slow_output(inputs, quantized) - exact
        decibels.append(float(10 * torch.log10(exact.square().sum() / error.square().sum())))
    assert decibels[0] > 39
    assert decibels[1] < 25


def test_the_criterion_counts_the_share_itself() -> None:
    share = torch.zeros(64)
    share[[5, 6, 7]] = torch.tensor([0.00499, 0.005, 0.00501])
    stats = InputStats(tokens=10_000, outlier_share=share)
    solved = llm_int8.quantize(layer()[0], stats, Grid(8), llm_int8.Config(), torch.float16)
    assert solved.quantized.outlier_columns is not None
    assert solved.quantized.outlier_columns.tolist() == [6, 7]


def test_no_outliers_is_plain_int8() -> None:
    weight = layer()[0]
    stats = InputStats(tokens=1, outlier_share=torch.zeros(64))
    quantized = llm_int8.quantize(weight, stats, Grid(8), llm_int8.Config(), torch.float16).quantized
    assert quantized.outlier_columns is not None and quantized.outlier_weight is not None
    assert quantized.outlier_columns.shape == (0,) and quantized.outlier_weight.shape == (48, 0)
    error = dequantize(quantized) - weight
    assert 10 * torch.log10(weight.square().sum() / error.square().sum()) > 44


def test_a_cap_keeps_the_strongest_and_says_so() -> None:
    share = torch.zeros(64)
    share[[50, 9, 20]] = torch.tensor([0.5, 0.3, 0.1])
    stats = InputStats(tokens=100, outlier_share=share)
    solved = llm_int8.quantize(layer()[0], stats, Grid(8), llm_int8.Config(max_columns=2), torch.float16)
    assert solved.quantized.outlier_columns is not None
    assert solved.quantized.outlier_columns.tolist() == [9, 50]
    assert solved.fallback == "3 outlier columns found, 2 kept: max_columns allows no more"


def test_needs_its_statistics() -> None:
    assert sorted(llm_int8.NEEDS) == ["outliers"]
    with pytest.raises(ValueError, match="outlier share"):
        llm_int8.quantize(layer()[0], None, Grid(8), llm_int8.Config(), torch.float16)
