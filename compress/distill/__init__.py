"""Distillation: what a student is trained towards, one loss per file, and the tensors that losses are made of.

A loss over next-token distributions offers `loss(student, target, settings) -> Tensor [n]`, nats per position for
student logits [n, V]. One whose NEEDS holds "hidden_states" offers `loss(student, teacher, mask, settings)` over the
hidden states of all layers instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# What a loss may need of the teacher, beside the text itself.
DISTRIBUTION = "distribution"
HIDDEN_STATES = "hidden_states"


@dataclass(frozen=True)
class TopK:
    """The head of a teacher's next-token distributions: what a cache on disk keeps of them.

    log_probs: float [n, k], natural logarithms, descending; indices: int64 [n, k]. Whatever their exponentials lack of
    1 is the mass of all other tokens.
    """

    log_probs: Tensor
    indices: Tensor


@dataclass(frozen=True)
class Target:
    """What text and teacher say of n positions.

    labels: int64 [n], the token that follows. teacher: its logits float [n, V], or the head of its distributions; None
    where no loss needs a teacher.
    """

    labels: Tensor
    teacher: Tensor | TopK | None = None
