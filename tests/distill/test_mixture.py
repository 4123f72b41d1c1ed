"""Mixtures of losses: the weighted sum of their parts, over one chunk of logits."""

from __future__ import annotations

import pytest
import torch

from compress.distill import DISTRIBUTION, HIDDEN_STATES, Target, cross_entropy, forward_kl, hidden_states, reverse_kl
from compress.distill.mixture import Term, needs, token_loss
from tests.distill.oracle import ROWS, close, logits, top

TERMS = [
    Term(forward_kl, forward_kl.Config(temperature=2.0), 0.7),
    Term(cross_entropy, cross_entropy.Config(), 0.2),
    Term(reverse_kl, reverse_kl.Config(), 3.0),
]
LABELS = torch.arange(ROWS)


def test_it_is_the_weighted_sum() -> None:
    student, target = logits(1).requires_grad_(), Target(LABELS, logits(2))
    parts = [term.weight * term.method.loss(student, target, term.settings) for term in TERMS]
    expected = parts[0] + parts[1] + parts[2]
    found = token_loss(TERMS)(student, target)
    assert close(found, expected, 1e-14)
    (ours,), (theirs,) = (torch.autograd.grad(value.sum(), student) for value in (found, expected))
    assert close(ours, theirs, 1e-12)
    alone = token_loss(TERMS[1:2])(student, Target(LABELS))
    assert close(alone, 0.2 * torch.nn.functional.cross_entropy(student, LABELS, reduction="none"), 1e-12)
    assert token_loss(TERMS[1:])(student, Target(LABELS, top(logits(2), 3))).shape == (ROWS,)


def test_what_they_need_of_the_teacher() -> None:
    states = Term(hidden_states, hidden_states.Config())
    assert needs(TERMS[1:2]) == frozenset()
    assert needs(TERMS) == {DISTRIBUTION}
    assert needs([*TERMS, states]) == {DISTRIBUTION, HIDDEN_STATES}
    for wrong in ([], [states], [*TERMS, states]):
        with pytest.raises(ValueError, match="one or more losses that take logits"):
            token_loss(wrong)
