"""Perplexity and its standard error against slow, obvious computations."""

from __future__ import annotations

from math import exp, isinf, isnan, log, sqrt

import pytest
import torch

from compress.eval.perplexity import bits_per_byte, perplexity, perplexity_ratio


def test_a_uniform_model_has_the_vocabulary_as_perplexity() -> None:
    ppl, stderr = perplexity(torch.full((5, 7), log(100.0), dtype=torch.float64))
    assert ppl == pytest.approx(100.0, rel=1e-12)
    assert stderr == pytest.approx(0.0, abs=1e-9)


def test_the_error_is_that_of_the_window_means() -> None:
    nll = torch.rand(6, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    means = [sum(row) / 11 for row in nll.tolist()]
    mean = sum(means) / 6
    spread = sqrt(sum((value - mean) ** 2 for value in means) / 5)
    ppl, stderr = perplexity(nll)
    assert ppl == pytest.approx(exp(mean), rel=1e-12)
    assert stderr == pytest.approx(exp(mean) * spread / sqrt(6), rel=1e-9)


def test_the_error_covers_the_truth_where_windows_differ() -> None:
    """Windows with a topic of their own: an error over independent tokens would be ten times too small."""
    generator = torch.Generator().manual_seed(1)
    covered = 0
    for _ in range(200):
        topics = torch.randn(40, 1, dtype=torch.float64, generator=generator)
        nll = 3 + topics + 0.3 * torch.randn(40, 100, dtype=torch.float64, generator=generator)
        ppl, stderr = perplexity(nll)
        assert stderr is not None
        covered += abs(log(ppl) - 3) < 2 * stderr / ppl
    assert 180 <= covered <= 200


def test_a_single_window_has_no_error() -> None:
    assert perplexity(torch.ones(1, 4, dtype=torch.float64)) == (pytest.approx(exp(1)), None)


def test_the_ratio_is_paired() -> None:
    baseline = torch.rand(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 5
    ratio, stderr = perplexity_ratio(baseline + log(1.1), baseline)
    assert ratio == pytest.approx(1.1, rel=1e-12)
    assert stderr == pytest.approx(0.0, abs=1e-9)


def test_a_broken_model_shows() -> None:
    assert isinf(perplexity(torch.full((2, 2), 1e4, dtype=torch.float64))[0])
    assert isnan(perplexity(torch.full((2, 2), float("nan"), dtype=torch.float64))[0])


def test_bits_per_byte() -> None:
    assert bits_per_byte(torch.full((2, 4), log(2.0), dtype=torch.float64), nbytes=16) == pytest.approx(0.5)
