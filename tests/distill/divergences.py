"""What every divergence between two next-token distributions must do, whichever it is."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.distill import Target, TopK
from compress.errors import InputError
from tests.distill.oracle import ROWS, TOKENS, Compare, close, logits, slow, top

LABELS = torch.zeros(ROWS, dtype=torch.int64)


def loss(method: ModuleType, student: Tensor, teacher: Tensor | TopK, settings: Any = None) -> Tensor:
    found: Tensor = method.loss(student, Target(LABELS[: len(student)], teacher), settings or method.Config())
    return found


def check_values(method: ModuleType, compare: Compare, **settings: float) -> None:
    """Both types, and temperatures, against the oracle; teachers and students of another width too."""
    for temperature in (1.0, 2.5):
        config = method.Config(temperature=temperature, **settings)
        for width in (TOKENS, TOKENS - 4, TOKENS + 3):
            student, teacher = logits(1), logits(2, tokens=width)
            expected = slow(student, teacher, compare, temperature)
            assert float(expected.min()) > 0.01  # something is compared
            assert close(loss(method, student, teacher, config), expected, 1e-12)
            single = loss(method, student.float(), teacher.float(), config)
            assert single.dtype == torch.float32 and close(single, expected, 1e-5)
    # The type of a training in half precision: the same as of the rounded numbers, in float32.
    half = loss(method, logits(1).bfloat16(), logits(2).bfloat16(), method.Config(**settings))
    expected = slow(logits(1).bfloat16().double(), logits(2).bfloat16().double(), compare)
    assert half.dtype == torch.float32 and close(half, expected, 1e-5)


def check_top_k(method: ModuleType, compare: Compare, **settings: float) -> None:
    """Lumps against the oracle; a lower bound that rises with k and is met at k = V."""
    config = method.Config(**settings)
    student, teacher = logits(1), logits(2)
    whole = loss(method, student, teacher, config)
    before = torch.zeros(ROWS, dtype=torch.float64)
    for k in (1, 2, 5, TOKENS - 1, TOKENS):
        found = loss(method, student, top(teacher, k), config)
        assert close(found, slow(student, teacher, compare, k=k), 1e-6)
        assert bool((found >= before - 1e-6).all()) and bool((found <= whole + 1e-6).all())
        before = found
    assert close(before, whole, 1e-12)
    two = loss(method, student, top(teacher, 2), config)
    assert float((whole - two).min()) > 1e-3  # a bound, not the divergence
    # What a cache keeps in few bits may sum to more than 1; nothing is below zero for it.
    kept = top(teacher, TOKENS - 1)
    rough = TopK((kept.log_probs + 0.01).half().clamp(max=0), kept.indices)
    assert float(rough.log_probs.double().exp().sum(-1).max()) > 1
    found = loss(method, teacher, rough, config)
    assert bool((found >= 0).all()) and float(found.max()) < 0.5
    kept = top(teacher, 3)
    # A student with padding has it among the other tokens, and one without a cached token is refused.
    padded = torch.cat([student, logits(5, tokens=4)], dim=1)
    assert close(
        loss(method, padded, kept, config),
        slow(padded, torch.cat([teacher, torch.full((ROWS, 4), -1e3).double()], dim=1), compare, k=3),
        1e-6,
    )
    with pytest.raises(InputError, match=f"it gives token {int(kept.indices.max())} a probability, and the student"):
        loss(method, student[:, : int(kept.indices.max())], kept, config)
    with pytest.raises(InputError, match="temperature: 2 with an offline teacher.*use an online teacher"):
        loss(method, student, kept, method.Config(temperature=2, **settings))


def check_gradients(method: ModuleType, **settings: float) -> None:
    """Finite differences, with a full teacher, a tempered one and one known by its head."""
    student = logits(1, rows=3, tokens=6, spread=1.0).requires_grad_()
    teacher = logits(2, rows=3, tokens=6, spread=1.0)
    for known, temperature in ((teacher, 1.0), (teacher, 2.5), (top(teacher, 2), 1.0), (top(teacher, 6), 1.0)):
        config = method.Config(temperature=temperature, **settings)
        assert torch.autograd.gradcheck(lambda x, known=known, config=config: loss(method, x, known, config), student)


def check_identical(method: ModuleType, **settings: float) -> None:
    """Nothing to learn where both agree, however the logits are shifted."""
    config = method.Config(**settings)
    student = logits(1).requires_grad_()
    for teacher in (logits(1) + 5, top(logits(1), 4)):
        found = loss(method, student, teacher, config)
        (gradient,) = torch.autograd.grad(found.sum(), student)
        assert close(found, torch.zeros_like(found), 1e-6) and close(gradient, torch.zeros_like(gradient), 1e-6)


def check_zeros(method: ModuleType, compare: Compare, **settings: float) -> None:
    """Probabilities of zero, of both, of either, by -inf and by numbers that vanish: no NaN, and finite gradients."""
    config = method.Config(**settings)
    student, teacher = logits(1), logits(2)
    student[:, 3], teacher[:, 3] = -torch.inf, -torch.inf
    student[1, 4], teacher[2, 4] = -torch.inf, -torch.inf
    student[3, 5], teacher[4, 5] = -2000.0, -2000.0
    for dtype in (torch.float64, torch.float32):
        ours = student.to(dtype).requires_grad_()
        for known in (teacher.to(dtype), top(teacher.to(dtype), 4), top(teacher.to(dtype), TOKENS)):
            found = loss(method, ours, known, config)
            (gradient,) = torch.autograd.grad(found.sum(), ours)
            assert bool(found.isfinite().all()) and bool(gradient.isfinite().all())
            assert bool((found > 0).all())
    rows = [0, 1, 2, 5, 6]  # where the oracle can take logarithms of what vanishes
    assert close(loss(method, student, teacher, config)[rows], slow(student, teacher, compare)[rows], 1e-12)


def check_no_teacher(method: ModuleType) -> None:
    with pytest.raises(ValueError, match="needs the teacher's distribution"):
        method.loss(logits(1), Target(LABELS), method.Config())
