"""Cross entropy on labels against logarithms in plain numbers."""

from __future__ import annotations

from math import log

import pytest
import torch

from compress.distill import Target, cross_entropy
from tests.distill.oracle import ROWS, TOKENS, close, logits, probabilities

LABELS = torch.tensor([0, 3, TOKENS - 1, 5, 5, 1, 2])
SETTINGS = cross_entropy.Config()


def test_values() -> None:
    chosen = zip(logits(1).tolist(), LABELS.tolist(), strict=True)
    expected = torch.tensor([-log(probabilities(row)[label]) for row, label in chosen], dtype=torch.float64)
    assert close(cross_entropy.loss(logits(1), Target(LABELS), SETTINGS), expected, 1e-12)
    single = cross_entropy.loss(logits(1).float(), Target(LABELS), SETTINGS)
    assert single.dtype == torch.float32 and close(single, expected, 1e-6)
    half = cross_entropy.loss(logits(1).bfloat16(), Target(LABELS), SETTINGS)
    assert half.dtype == torch.float32
    assert close(half, cross_entropy.loss(logits(1).bfloat16().double(), Target(LABELS), SETTINGS), 1e-6)
    # The teacher has no say.
    assert torch.equal(single, cross_entropy.loss(logits(1).float(), Target(LABELS, logits(2)), SETTINGS))


def test_gradients() -> None:
    student = logits(1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: cross_entropy.loss(x, Target(LABELS), SETTINGS), student)
    (gradient,) = torch.autograd.grad(cross_entropy.loss(student, Target(LABELS), SETTINGS).sum(), student)
    assert close(gradient, student.softmax(-1) - torch.nn.functional.one_hot(LABELS, TOKENS), 1e-12)


def test_tokens_without_probability() -> None:
    student = logits(1)
    student[:, 7] = -torch.inf
    student[1, 3] = -torch.inf  # a label
    student = student.requires_grad_()
    found = cross_entropy.loss(student, Target(LABELS), SETTINGS)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    found = found.detach()
    assert float(found[1]) == 1e4 and float(found[torch.arange(ROWS) != 1].max()) < 100
    assert bool(gradient.isfinite().all())


def test_a_label_is_a_token() -> None:
    assert frozenset() == cross_entropy.NEEDS
    for wrong in (-100, TOKENS):
        with pytest.raises((IndexError, RuntimeError)):
            cross_entropy.loss(logits(1), Target(torch.full((ROWS,), wrong)), SETTINGS)
