"""Statistics of inputs against a loop over tokens, and what makes them refuse."""

from __future__ import annotations

import pytest
import torch

from compress.errors import InputError
from compress.stats import STRIP, StatsAccumulator

BATCHES = [torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed)) * 4 for seed in range(3)]


STATISTICS = frozenset({"mean_abs", "hessian", "outliers"})


def collected(needs: frozenset[str] = STATISTICS) -> StatsAccumulator:
    accumulator = StatsAccumulator("layer", needs, threshold=6.0)
    for batch in BATCHES:
        accumulator.add(batch)
    return accumulator


def test_equals_a_loop_over_tokens() -> None:
    result = collected().result()
    tokens = torch.cat([batch.reshape(-1, 8) for batch in BATCHES]).double()
    hessian = torch.zeros(8, 8).double()
    for token in tokens:
        hessian += token[:, None] * token[None, :] / len(tokens)
    assert result.tokens == len(tokens) == 30
    assert result.hessian is not None and torch.allclose(result.hessian.double(), hessian, atol=1e-5)
    assert result.absmax is not None and torch.allclose(result.absmax.double(), tokens.abs().amax(0))
    assert result.mean_abs is not None and torch.allclose(result.mean_abs.double(), tokens.abs().mean(0), atol=1e-6)
    assert result.outlier_share is not None
    assert result.outlier_share.tolist() == pytest.approx((tokens.abs() >= 6).double().mean(0).tolist())


@pytest.mark.parametrize("width", [STRIP - 1, STRIP, 2 * STRIP + 5])
def test_strips_make_the_whole_symmetric_hessian(width: int) -> None:
    accumulator = StatsAccumulator("wide", frozenset({"hessian"}))
    x = torch.randn(40, width, generator=torch.Generator().manual_seed(9))
    accumulator.add(x[:25])
    accumulator.add(x[25:])
    hessian = accumulator.result().hessian
    assert hessian is not None and torch.allclose(hessian, hessian.T, atol=1e-6)
    assert torch.allclose(hessian, x.T @ x / 40, atol=1e-5)


def test_only_what_is_needed_is_kept() -> None:
    result = collected(frozenset()).result()
    assert result.hessian is None and result.mean_abs is None and result.outlier_share is None
    assert result.absmax is not None, "which tells dead channels, and costs nothing"


def test_scaled_equals_statistics_of_scaled_inputs() -> None:
    scale = torch.linspace(0.5, 4, 8)
    scaled = StatsAccumulator("layer", STATISTICS, 6.0)
    for batch in BATCHES:
        scaled.add(batch / scale)
    expected, mine = scaled.result(), collected().result().scaled(scale)
    for name in ("absmax", "mean_abs", "hessian"):
        assert torch.allclose(getattr(mine, name), getattr(expected, name), rtol=1e-5, atol=1e-6), name
    assert mine.outlier_share is None


def test_dead_channels_are_counted() -> None:
    accumulator = StatsAccumulator("layer", frozenset({"hessian"}))
    accumulator.add(BATCHES[0].index_fill(2, torch.tensor([1, 4]), 0))
    assert accumulator.result().dead_channels == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_activations_are_named(value: float) -> None:
    broken = BATCHES[0].clone()
    broken[1, 2, 3] = value
    with pytest.raises(InputError, match="q_proj: input channel 3 is NaN or infinite"):
        StatsAccumulator("q_proj", frozenset()).add(broken)


def test_no_token_at_all_is_an_error() -> None:
    with pytest.raises(InputError, match="expert: saw no token"):
        StatsAccumulator("expert", STATISTICS).result()
