"""Generalised Jensen-Shannon divergence: between forward KL (beta towards 0) and reverse KL (towards 1), bounded.

GKD, arXiv 2306.13649, section 2: beta KL(P || M) + (1 - beta) KL(Q || M), M = beta P + (1 - beta) Q, of teacher P and
student Q. Both ends vanish; divided by beta, and by 1 - beta, they tend to forward and to reverse KL.
"""

from __future__ import annotations

from math import log, log1p

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from compress.distill import DISTRIBUTION, Target
from compress.distill.distributions import divergence, log_probabilities

NEEDS = frozenset({DISTRIBUTION})


class Config(BaseModel):
    """beta: the teacher's share of the mixture, between 0 and 1. temperature: as of forward_kl."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    beta: float = Field(default=0.5, gt=0, lt=1)
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)


def loss(student: Tensor, target: Target, settings: Config) -> Tensor:
    """temperature**2 times the divergence in nats, [n], of student logits [n, V]; below temperature**2 * log 2.

    Of a teacher known by its k largest probabilities, what is left of the teacher's mass is compared with what is left
    of the student's, each as one lump: a lower bound of the true divergence, equal to it for k = V.
    """
    beta = settings.beta
    teacher_log, student_log = log_probabilities(student, target, settings.temperature)
    mixture = torch.logaddexp(teacher_log + log(beta), student_log + log1p(-beta))
    parts = beta * divergence(teacher_log, mixture) + (1 - beta) * divergence(student_log, mixture)
    return settings.temperature**2 * parts
