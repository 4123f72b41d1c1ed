"""Next-token distributions of student and teacher, made comparable: same outcomes, float32 or better, no infinities."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.distill import Target, TopK
from compress.errors import USAGE, InputError

# A probability of zero counts as exp(LOWEST): times zero it is zero and not NaN, and what it multiplies is large.
LOWEST = -1e4
# Less than this cannot be told from rounding once it is 1 minus a sum of float32 numbers.
SMALLEST_TAIL = 1e-7


def log_probabilities(student: Tensor, target: Target, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities of teacher and of student over the same outcomes, both [n, outcomes].

    student: logits [n, V]. A teacher given as logits [n, V_t] makes every token an outcome; the wider of the two is cut
    to the other's width first, for what it has more is padding. A teacher given by its k largest log-probabilities
    makes those tokens outcomes and all others together one more; that outcome is missing where k = V. The softmax is
    taken of logits / temperature, in float32 (float64 where the student's logits are). InputError for a temperature
    other than 1 with a TopK, and for a token in it that the student does not have.
    """
    dtype = torch.promote_types(student.dtype, torch.float32)
    teacher = target.teacher
    if teacher is None:
        raise ValueError("a divergence needs the teacher's distribution")
    if isinstance(teacher, TopK):
        refuse_temperature(temperature)
        return _teacher_head(teacher, student.shape[1], dtype), _student_head(student, teacher.indices, dtype)
    width = min(student.shape[1], teacher.shape[1])
    return _tempered(teacher[:, :width], temperature, dtype), _tempered(student[:, :width], temperature, dtype)


def refuse_temperature(temperature: float) -> None:
    """InputError unless `temperature` is one that a teacher of k tokens a position can serve: 1."""
    if temperature != 1:
        raise InputError(
            f"temperature: {temperature:g} with an offline teacher: it keeps the sum of the other tokens'"
            " probabilities, which cannot be tempered: use an online teacher, or temperature 1",
            USAGE,
        )


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) [n] in nats, of log-probabilities [n, outcomes] that are finite."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def _tempered(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    logits = logits.to(dtype)
    return (logits if temperature == 1 else logits / temperature).log_softmax(dim=-1).clamp(min=LOWEST)


def _teacher_head(teacher: TopK, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Log-probabilities [n, k + 1], the last that of all other tokens, or [n, k] where there are none.

    They are made to sum to 1: numbers kept in few bits may sum to more.
    """
    if teacher.indices.numel() and (highest := int(teacher.indices.max())) >= vocabulary:
        raise InputError(
            f"teacher: it gives token {highest} a probability, and the student has {vocabulary} tokens: cut the"
            " teacher's logits to the student's vocabulary before its largest are kept"
        )
    outcomes = teacher.log_probs.to(dtype)
    if outcomes.shape[1] < vocabulary:
        tail = (1 - outcomes.exp().sum(dim=-1, keepdim=True)).clamp(min=SMALLEST_TAIL).log()
        outcomes = torch.cat([outcomes, tail], dim=-1)
    return outcomes.log_softmax(dim=-1).clamp(min=LOWEST)


def _student_head(logits: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """The student's log-probabilities of the outcomes of _teacher_head; its tail is summed, not 1 minus a sum."""
    logits = logits.to(dtype)
    outcomes = logits.gather(-1, indices)
    if indices.shape[1] < logits.shape[1]:
        tail = logits.scatter(-1, indices, -torch.inf).logsumexp(dim=-1, keepdim=True)
        outcomes = torch.cat([outcomes, tail], dim=-1)
    return outcomes.log_softmax(dim=-1).clamp(min=LOWEST)
