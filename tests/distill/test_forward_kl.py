"""Forward KL against a sum over tokens in plain numbers."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from compress.distill import DISTRIBUTION, forward_kl
from tests.distill import divergences
from tests.distill.oracle import close, kl, logits


def test_values() -> None:
    divergences.check_values(forward_kl, kl)


def test_the_teacher_known_by_its_largest() -> None:
    divergences.check_top_k(forward_kl, kl)


def test_gradients() -> None:
    divergences.check_gradients(forward_kl)


def test_agreement_and_zeros() -> None:
    divergences.check_identical(forward_kl)
    divergences.check_zeros(forward_kl, kl)
    divergences.check_no_teacher(forward_kl)


def test_the_gradient_is_what_the_student_has_too_much() -> None:
    """d/dz KL(P || Q) = Q - P; at a temperature T, T**2 times 1/T of it: (Q_T - P_T) T."""
    student, teacher = logits(1).requires_grad_(), logits(2)
    for temperature in (1.0, 3.0):
        settings = forward_kl.Config(temperature=temperature)
        (gradient,) = torch.autograd.grad(divergences.loss(forward_kl, student, teacher, settings).sum(), student)
        difference = (student / temperature).softmax(-1) - (teacher / temperature).softmax(-1)
        assert close(gradient, difference * temperature, 1e-12)


def test_settings() -> None:
    assert {DISTRIBUTION} == forward_kl.NEEDS
    for wrong in ({"temperature": 0}, {"temperature": float("inf")}, {"beta": 0.5}):
        with pytest.raises(ValidationError):
            forward_kl.Config.model_validate(wrong)
