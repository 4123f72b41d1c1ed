"""Round to nearest: what the shared scale search gives, at known decibels, whatever calibration saw."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from compress.formats.grid import Grid, dequantize
from compress.quantize import rtn
from compress.quantize.scales import Search, nearest
from compress.stats import InputStats


@pytest.mark.parametrize(("search", "floor"), [("minmax", 20.2), ("mse", 20.8)])
def test_decibels_and_scales(search: Search, floor: float) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    grid = Grid(4, True, 64)
    solved = rtn.quantize(weight, None, grid, rtn.Config(search=search), torch.bfloat16)
    expected = nearest(weight, grid, search, torch.bfloat16)
    assert torch.equal(solved.quantized.q, expected.q) and torch.equal(solved.quantized.scale, expected.scale)
    error = dequantize(solved.quantized) - weight
    assert 10 * torch.log10(weight.square().sum() / error.square().sum()) > floor
    assert (solved.damping, solved.fallback) == (None, None)


def test_statistics_have_no_say() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    stats = InputStats(tokens=1, absmax=torch.ones(64), hessian=torch.eye(64))
    with_stats, without = (
        rtn.quantize(weight, seen, Grid(8), rtn.Config(), torch.float16).quantized for seen in (stats, None)
    )
    assert torch.equal(with_stats.q, without.q) and torch.equal(with_stats.scale, without.scale)


def test_settings() -> None:
    assert not rtn.NEEDS and rtn.Config().search == "mse"
    with pytest.raises(ValidationError):
        rtn.Config(search="maxmin")  # type: ignore[arg-type]
