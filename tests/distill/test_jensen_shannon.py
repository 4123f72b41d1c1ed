"""Jensen-Shannon divergence against a sum over tokens in plain numbers."""

from __future__ import annotations

from math import log

import pytest
import torch
from pydantic import ValidationError

from compress.distill import DISTRIBUTION, forward_kl, jensen_shannon, reverse_kl
from tests.distill import divergences
from tests.distill.oracle import Compare, close, kl, logits

BETAS = pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])


def jensen(beta: float) -> Compare:
    def compare(p: list[float], q: list[float]) -> float:
        mixture = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
        return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)

    return compare


@BETAS
def test_values(beta: float) -> None:
    divergences.check_values(jensen_shannon, jensen(beta), beta=beta)


@BETAS
def test_the_teacher_known_by_its_largest(beta: float) -> None:
    divergences.check_top_k(jensen_shannon, jensen(beta), beta=beta)


@BETAS
def test_gradients(beta: float) -> None:
    divergences.check_gradients(jensen_shannon, beta=beta)


@BETAS
def test_agreement_and_zeros(beta: float) -> None:
    divergences.check_identical(jensen_shannon, beta=beta)
    divergences.check_zeros(jensen_shannon, jensen(beta), beta=beta)
    divergences.check_no_teacher(jensen_shannon)


def test_its_ends_are_forward_and_reverse_kl() -> None:
    ours, theirs = logits(1, spread=1.0), logits(2, spread=1.0)
    low = divergences.loss(jensen_shannon, ours, theirs, jensen_shannon.Config(beta=1e-5)) / 1e-5
    high = divergences.loss(jensen_shannon, ours, theirs, jensen_shannon.Config(beta=1 - 1e-5)) / 1e-5
    assert close(low, divergences.loss(forward_kl, ours, theirs), 1e-3)
    assert close(high, divergences.loss(reverse_kl, ours, theirs), 1e-3)


def test_it_is_symmetric_and_bounded_at_a_half() -> None:
    ours, theirs = logits(1, spread=100.0), logits(2, spread=100.0)
    found = divergences.loss(jensen_shannon, ours, theirs)
    assert close(found, divergences.loss(jensen_shannon, theirs, ours), 1e-12)
    assert float(found.max()) <= log(2) + 1e-12 and float(found.max()) > 0.69
    assert torch.all(found >= 0)


def test_settings() -> None:
    assert {DISTRIBUTION} == jensen_shannon.NEEDS
    for beta in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(ValidationError):
            jensen_shannon.Config(beta=beta)
