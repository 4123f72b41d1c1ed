"""Several losses over the same logits, mixed by weight: a chunk's logits are computed once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from pydantic import BaseModel
from torch import Tensor

from compress.distill import HIDDEN_STATES, Target


@dataclass(frozen=True)
class Term:
    """One loss of a mixture: its module (compress.distill.<loss>), the settings of its Config, and its weight."""

    method: ModuleType
    settings: BaseModel
    weight: float = 1.0


def needs(terms: Sequence[Term]) -> frozenset[str]:
    """What of the teacher the terms need together."""
    return frozenset[str]().union(*(term.method.NEEDS for term in terms))


def token_loss(terms: Sequence[Term]) -> Callable[[Tensor, Target], Tensor]:
    """The function (student logits [n, V], target) -> sum over terms of weight * loss, [n]. Weights are taken as given.

    ValueError for no terms, and for a loss over hidden states, which has no logits.
    """
    if not terms or HIDDEN_STATES in needs(terms):
        raise ValueError("a loss of logits is made of one or more losses that take logits")

    def mixed(student: Tensor, target: Target) -> Tensor:
        losses = [term.weight * term.method.loss(student, target, term.settings) for term in terms]
        return torch.stack(losses).sum(dim=0)

    return mixed
