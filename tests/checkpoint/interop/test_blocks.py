"""GGUF blocks: byte for byte what the gguf package's reference makes, and integers carried over unchanged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from compress.checkpoint.interop import blocks
from compress.formats.grid import Grid, Quantized, dequantize
from tests.runtime.packing import nearest

KINDS = {"Q4_0": GGMLQuantizationType.Q4_0, "Q8_0": GGMLQuantizationType.Q8_0}


def awkward() -> Tensor:
    """Blocks of every kind: random of many magnitudes, zero, one value, equal extremes of either sign, exact halves."""
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.logspace(-8, 3, 60)[:, None]
    random = torch.randn(60, 64, generator=generator) * magnitudes
    tied = torch.tensor([-1.0, 1.0, 0.5, -0.5]).repeat(16)[None]
    halves = torch.cat([torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5]), torch.zeros(58)])[None]
    single = torch.zeros(1, 64).index_fill(1, torch.tensor([5]), -3.0)
    subnormal = torch.randn(1, 64, generator=generator) * 1e-7
    return torch.cat([random, torch.zeros(1, 64), single, tied, tied.flip(1), halves, subnormal])


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_the_reference_byte_for_byte(kind: str) -> None:
    weight = awkward()
    expected = quants.quantize(weight.numpy(), KINDS[kind])
    assert np.array_equal(blocks.round_to(kind, weight).numpy(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_weights_round_alike(kind: str) -> None:
    """Weights of few bits hit exact ties far more often."""
    weight = torch.randn(256, 96, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    assert np.array_equal(blocks.round_to(kind, weight).numpy(), quants.quantize(weight.numpy(), KINDS[kind]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
@pytest.mark.parametrize("kind", KINDS)
def test_values_without_a_scale_are_refused(kind: str, value: float) -> None:
    with pytest.raises(ValueError, match="float16"):
        blocks.round_to(kind, torch.zeros(2, 32).index_fill(1, torch.tensor([3]), value))


@pytest.mark.parametrize(
    ("kind", "grid"),
    [
        ("Q4_0", Grid(4, True, 32)),
        ("Q4_0", Grid(4, True, 64)),
        ("Q4_0", Grid(4)),
        ("Q8_0", Grid(8)),
        ("Q8_0", Grid(8, True, 96)),
    ],
)
def test_integers_are_carried_over(kind: str, grid: Grid) -> None:
    quantized = nearest(torch.randn(24, 192, generator=torch.Generator().manual_seed(2)), grid)
    quantized.q[0, :2] = torch.tensor([grid.minimum, grid.maximum], dtype=torch.int8)
    quantized.scale[1] *= -1
    data, scale = blocks.carry(kind, quantized)
    assert torch.equal(scale.float(), quantized.scale.float())
    assert np.array_equal(quants.dequantize(data.numpy(), KINDS[kind]), dequantize(quantized).numpy())


def test_which_grids_fit() -> None:
    assert blocks.carries("Q4_0", 4, 64, plain=True) and blocks.carries("Q8_0", 8, 576, plain=True)
    assert not blocks.carries("Q4_0", 4, 48, plain=True)
    assert not blocks.carries("Q4_0", 8, 64, plain=True) and not blocks.carries("F16", 4, 64, plain=True)
    assert not blocks.carries("Q4_0", 4, 64, plain=False)


def test_a_scale_beyond_float16_is_refused() -> None:
    quantized = Quantized(torch.ones(2, 32, dtype=torch.int8), torch.tensor([[1.0], [1e6]]))
    with pytest.raises(ValueError, match="scale"):
        blocks.carry("Q8_0", quantized)
