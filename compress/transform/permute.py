"""Channels put into another order, so that 2:4 keeps more of what matters (Pool and Yu, NeurIPS 2021, section 4).

Which four columns share a group is chance in a trained model. Between a pair of linear layers the channels may stand in
any order: rows of the first and columns of the second move together, within a head where heads read them. The search
takes two groups at a time and deals their eight columns out anew, the best of all 35 ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from compress.stats import InputStats

NEEDS = frozenset({"mean_square"})

# The ways to deal eight columns out to two groups of four.
WAYS = [(*first, *(i for i in range(8) if i not in first)) for first in combinations(range(8), 4) if 0 in first]
# A group's value is counted once, however many ways it is part of.
GROUPS = sorted({half for way in WAYS for half in (way[:4], way[4:])})


class Config(BaseModel):
    """rounds: in each, every group meets one other. rows: of the weights that are looked at, evenly spread."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rounds: int = Field(default=100, ge=1)
    rows: int = Field(default=128, ge=1)
    seed: int = Field(default=0, ge=0)


def order(weights: Sequence[Tensor], stats: InputStats, config: Config, heads: tuple[int, int]) -> Tensor:
    """The new order of the input channels of `weights` (each [N, K]), int64 [units, size]: within each unit.

    heads: how many heads read one unit, and its size; K = units * repeat * size. What is kept is valued by Wanda's
    measure, the squares of weights times those of inputs (arXiv 2306.11695).
    """
    if stats.mean_square is None:
        raise ValueError("permute needs the mean squares of its inputs")
    stacked = torch.cat(list(weights))
    chosen = torch.linspace(0, len(stacked) - 1, min(config.rows, len(stacked)), device=stacked.device).long()
    values = stacked[chosen].square() * stats.mean_square
    repeat, size = heads
    units = values.T.reshape(-1, repeat, size, len(chosen)).transpose(1, 2).flatten(2)  # [units, size, repeat * rows]
    generator = torch.Generator().manual_seed(config.seed)
    return torch.stack([search(unit, config.rounds, generator) for unit in units])


def search(values: Tensor, rounds: int, generator: torch.Generator) -> Tensor:
    """An order int64 [K] of channels with `values` [K, R] whose groups of four keep more in their two largest.

    No round makes it worse. K is a multiple of 4.
    """
    found = torch.arange(len(values), device=values.device)
    ways = torch.tensor(WAYS, device=values.device)
    parts = torch.tensor([[GROUPS.index(way[:4]), GROUPS.index(way[4:])] for way in WAYS], device=values.device)
    for _ in range(rounds):
        groups = found.view(-1, 4)
        shuffled = groups[torch.randperm(len(groups), generator=generator).to(values.device)]
        even = len(shuffled) // 2 * 2
        pairs = shuffled[:even].reshape(-1, 8)
        kept = torch.stack([retained(values[pairs[:, list(group)]]) for group in GROUPS], dim=1)
        best = kept[:, parts].sum(-1).argmax(1)
        found = torch.cat([pairs.gather(1, ways[best]).flatten(), shuffled[even:].flatten()])
    return found


def retained(values: Tensor) -> Tensor:
    """What 2:4 keeps of groups with `values` [M, 4, R]: the sum of the two largest of every four, [M]."""
    a, b, c, d = values.unbind(1)
    high, low = torch.maximum(a, b), torch.minimum(a, b)
    other_high, other_low = torch.maximum(c, d), torch.minimum(c, d)
    second = torch.maximum(torch.minimum(high, other_high), torch.maximum(low, other_low))
    return (torch.maximum(high, other_high) + second).sum(-1)
