"""Forward KL divergence, KL(teacher || student): the student covers all that the teacher finds likely.

The loss of arXiv 1503.02531, section 2, up to the teacher's entropy.
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
    """temperature**2 * KL(teacher || student) in nats, [n], of student logits [n, V].

    The square keeps the size of the gradients, which shrink by it (arXiv 1503.02531, section 2). Of a teacher known by
    its k largest probabilities, what is left of the teacher's mass is compared with what is left of the student's, each
    as one lump: a lower bound of the true divergence, equal to it for k = V.
    """
    teacher_log, student_log = log_probabilities(student, target, settings.temperature)
    return settings.temperature**2 * divergence(teacher_log, student_log)
