"""Reverse KL divergence, KL(student || teacher): the student avoids what the teacher finds unlikely (MiniLLM).

The divergence of arXiv 2306.08543, section 2.1, at each position of a given text; nothing is sampled.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from compress.distill import DISTRIBUTION, Target
from compress.distill.distributions import divergence, log_probabilities

NEEDS = frozenset({DISTRIBUTION})


class Config(BaseModel):
    """temperature: divides the logits of both before the softmax; anything but 1 needs an online teacher."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)


def loss(student: Tensor, target: Target, settings: Config) -> Tensor:
    """temperature**2 * KL(student || teacher) in nats, [n], of student logits [n, V].

    Where the teacher's probability is zero the true divergence is infinite; zero counts as exp(-10000) here, which
    is a large loss with a gradient. Of a teacher known by its k largest probabilities, what is left of the teacher's
    mass is compared with what is left of the student's, each as one lump: a lower bound of the true divergence, equal
    to it for k = V. A teacher's rest of less than 1e-7 counts as that.
    """
    teacher_log, student_log = log_probabilities(student, target, settings.temperature)
    return settings.temperature**2 * divergence(student_log, teacher_log)
