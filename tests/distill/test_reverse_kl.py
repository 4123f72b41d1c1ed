"""Reverse KL against a sum over tokens in plain numbers."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from compress.distill import DISTRIBUTION, forward_kl, reverse_kl
from tests.distill import divergences
from tests.distill.oracle import close, kl, logits


def reverse(p: list[float], q: list[float]) -> float:
    return kl(q, p)


def test_values() -> None:
    divergences.check_values(reverse_kl, reverse)


def test_the_teacher_known_by_its_largest() -> None:
    divergences.check_top_k(reverse_kl, reverse)


def test_gradients() -> None:
    divergences.check_gradients(reverse_kl)


def test_agreement_and_zeros() -> None:
    divergences.check_identical(reverse_kl)
    divergences.check_zeros(reverse_kl, reverse)
    divergences.check_no_teacher(reverse_kl)


def test_it_is_the_forward_one_with_the_roles_exchanged() -> None:
    ours, theirs = logits(1), logits(2)
    exchanged = divergences.loss(forward_kl, theirs, ours)
    assert close(divergences.loss(reverse_kl, ours, theirs), exchanged, 1e-12)
    assert not close(divergences.loss(forward_kl, ours, theirs), exchanged, 1e-2)


def test_settings() -> None:
    assert {DISTRIBUTION} == reverse_kl.NEEDS
    with pytest.raises(ValidationError):
        reverse_kl.Config(temperature=-1)
