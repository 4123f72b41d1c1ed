"""KL divergence against a slow oracle in float64, percentiles, and the histogram."""

from __future__ import annotations

from math import log

import pytest
import torch

from compress.eval.divergence import EDGES, histogram, percentile, summarize, token_divergence


def test_kl_equals_the_slow_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.log_softmax(4 * torch.randn(6, 500, generator=generator), dim=-1)
    q = torch.log_softmax(4 * torch.randn(6, 500, generator=generator), dim=-1)
    kl, agreement = token_divergence(p, q)
    for row in range(6):
        pairs = zip(p[row].double().tolist(), q[row].double().tolist(), strict=True)
        slow = sum(torch.tensor(a).exp().item() * (a - b) for a, b in pairs)
        assert kl[row].item() == pytest.approx(slow, rel=1e-5)
    assert agreement.tolist() == [bool(p[row].argmax() == q[row].argmax()) for row in range(6)]


def test_kl_of_a_model_to_itself_is_zero_and_the_direction_is_from_the_baseline() -> None:
    p = torch.tensor([[0.5, 0.5]]).log()
    q = torch.tensor([[0.9, 0.1]]).log()
    assert token_divergence(p, p)[0].item() == 0.0
    assert token_divergence(p, q)[0].item() == pytest.approx(0.5 * log(0.5 / 0.9) + 0.5 * log(0.5 / 0.1), rel=1e-6)
    assert token_divergence(q, p)[0].item() == pytest.approx(0.9 * log(0.9 / 0.5) + 0.1 * log(0.1 / 0.5), rel=1e-6)


def test_nan_is_not_hidden() -> None:
    broken = torch.full((1, 3), float("nan"))
    assert token_divergence(broken, broken)[0].isnan().all()


@pytest.mark.parametrize(("share", "value"), [(0.5, 50.0), (0.99, 99.0), (1.0, 100.0), (0.001, 1.0)])
def test_percentiles_are_values_that_occurred(share: float, value: float) -> None:
    assert percentile(torch.arange(1.0, 101.0), share) == value


def test_summary() -> None:
    summary = summarize(
        torch.tensor([0.0, 0.1, 0.2, 0.7], dtype=torch.float64), torch.tensor([True, True, True, False])
    )
    assert summary["kl_mean"] == pytest.approx(0.25)
    assert (summary["kl_median"], summary["kl_p99"], summary["kl_max"]) == (0.1, 0.7, 0.7)
    assert summary["top1_agreement"] == 0.75


def test_histogram_counts_every_number_once() -> None:
    kl = torch.tensor([0.0, 1e-12, 1e-8, 2e-8, 0.5, 1e3, float("nan")], dtype=torch.float64)
    found = histogram(kl)
    counts, edges = found["counts"], found["edges"]
    assert len(edges) == len(counts) + 1 == len(EDGES)
    assert sum(counts) == 6
    assert (counts[0], counts[1], counts[-1]) == (3, 1, 1)
    bin_of_half = next(index for index, edge in enumerate(edges) if edge > 0.5) - 1
    assert counts[bin_of_half] == 1
