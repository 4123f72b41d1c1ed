"""Transforms: rewrites of the weights that keep the model's function. One file each.

A smoothing transform moves a scale s [K] between a producer and its consumers: the producer's output is divided by s,
the consumers' input columns are multiplied by it. Its module says which s: `scale(weights, stats, rounding, config,
sources) -> s`. Folding s into the weights is the walk's part.

A permuting transform moves channels: `order(weights, stats, config, heads) -> int64 [units, size]`. It knows linear
pairs alone, and serves pruned consumers alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rounding:
    """What the quantize stage behind a transform will do to a weight.

    nearest(weight [N, K], cost [K] | None) -> [N, K]: the weight rounded to nearest on the stage's grid, its scales
    chosen under these costs of a column's squared error. damping: the solver's, where the stage is one that makes later
    columns give way for the errors of earlier ones (GPTQ); None where it only rounds.
    """

    nearest: Callable[[Tensor, Tensor | None], Tensor]
    damping: float | None = None


def head_sources(columns: int, repeat: int, head_size: int) -> Tensor:
    """The producer's output [K] that each of `columns` = K inputs reads, where each head feeds `repeat` heads."""
    column = torch.arange(columns)
    return column // (repeat * head_size) * head_size + column % head_size


def tie(values: Tensor, sources: Tensor | None) -> Tensor:
    """`values` [K], each replaced by the mean over the columns that read the same producer output."""
    if sources is None:
        return values
    sources = sources.to(values.device)
    outputs = int(sources.max()) + 1
    totals = torch.zeros(outputs, dtype=values.dtype, device=values.device).index_add_(0, sources, values)
    return (totals / torch.bincount(sources, minlength=outputs))[sources]
