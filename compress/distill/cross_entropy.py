"""Cross entropy on the text's own tokens: what plain fine-tuning minimises. No teacher."""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from compress.distill import Target
from compress.distill.distributions import LOWEST

NEEDS: frozenset[str] = frozenset()


class Config(BaseModel):
    """There is nothing to set: a label has no temperature."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def loss(student: Tensor, target: Target, settings: Config) -> Tensor:
    """-log of the student's probability of each label, in nats, [n], of student logits [n, V].

    The softmax is taken in float32 (float64 where the logits are). Every label is a token: there is none that stands
    for "ignored", give such a position no weight.
    """
    logits = student.to(torch.promote_types(student.dtype, torch.float32))
    chosen = logits.gather(-1, target.labels[:, None]).squeeze(-1)
    return -(chosen - logits.logsumexp(dim=-1)).clamp(min=LOWEST)
