"""SmoothQuant (arXiv 2211.10438, equation 4): move the activations' outliers into the weights, which bear them better.

s_k = max|X_k|^alpha / max|W_k|^(1 - alpha): a share `alpha` of what is hard about channel k goes to the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from compress.stats import InputStats
from compress.transform import Rounding, tie

NEEDS = frozenset({"absmax"})

_LEAST = 1e-5  # of a maximum: what is below counts as this, so that a nearly dead channel gets no huge factor


class Config(BaseModel):
    """alpha: 0.5 splits the difficulty evenly; 0.75 to 0.8 where activation outliers are stronger (section 4)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    alpha: float = Field(default=0.5, ge=0, le=1)


def scale(
    weights: Sequence[Tensor],
    stats: InputStats,
    rounding: Rounding | None,
    config: Config,
    sources: Tensor | None = None,
) -> Tensor:
    """The factor s [K] for the input columns of `weights` (each [N, K]) that read the inputs of `stats`.

    sources: per column the producer output it reads; columns of one output get one factor (from the mean of their
    maxima). Channels that were never active, or whose weights are all zero, keep the factor 1. `rounding` has no say.
    """
    if stats.absmax is None:
        raise ValueError("smoothquant needs the greatest magnitudes of its inputs")
    activation = tie(stats.absmax, sources)
    weight = tie(torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).float(), sources)
    factors = activation.clamp(min=_LEAST).pow(config.alpha) / weight.clamp(min=_LEAST).pow(1 - config.alpha)
    return torch.where((activation > 0) & (weight > 0), factors, torch.ones_like(factors))
