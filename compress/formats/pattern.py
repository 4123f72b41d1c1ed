"""N:M sparsity: of every M consecutive input columns of a row, N are kept and the others are zero."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.errors import USAGE, InputError


@dataclass(frozen=True)
class Pattern:
    """`keep` of every `of` consecutive columns."""

    keep: int
    of: int

    def __str__(self) -> str:
        return f"{self.keep}:{self.of}"


def pattern_named(text: str) -> Pattern:
    """The pattern written as "2:4". Raises InputError for what is none, or keeps nothing or all."""
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None or not 0 < int(found[1]) < int(found[2]):
        raise InputError(f"pattern: {text!r} is no pattern: give kept columns of a group, such as 2:4", USAGE)
    return Pattern(int(found[1]), int(found[2]))


def keep_largest(scores: Tensor, pattern: Pattern) -> Tensor:
    """Mask bool [N, K] that keeps, in every group of columns, those with the largest `scores` [N, K].

    Ties go to the earlier column, so that the mask is exact whatever the scores. K is a multiple of the group.
    """
    groups = scores.unflatten(-1, (-1, pattern.of))
    order = groups.argsort(dim=-1, descending=True, stable=True)
    mask = torch.zeros_like(groups, dtype=torch.bool)
    return mask.scatter_(-1, order[..., : pattern.keep], True).flatten(-2)


def follows(mask: Tensor, pattern: Pattern) -> bool:
    """Whether `mask` bool [N, K] keeps exactly so many columns of every group."""
    if mask.shape[-1] % pattern.of:
        return False
    return bool((mask.unflatten(-1, (-1, pattern.of)).sum(-1) == pattern.keep).all())
