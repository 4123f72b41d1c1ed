"""AWQ (arXiv 2306.00978, section 3.2): scale up the input channels that matter, so that the grid resolves them better.

The paper searches s = magnitude^a on a grid of 20 exponents. Here the magnitude of the activations meets that of the
weights, s = activation^a / weight^b: first with a = b, then over b alone; a = b = 0 changes nothing and is among them.

What a rounding error costs depends on what rounds. D [N, K] being the error of the weight, rounding to nearest pays
tr(D H D^T). A solver like GPTQ lets later columns take up the error of earlier ones, and pays sum_k pivot_k |D_k|^2,
where pivot_k is what is left of channel k once the later ones have explained what they can: the pivots of the
factorization H = R R^T that the solver works with; their roots then stand for the activations as well. On SmolLM2-135M
(int4, group 64, output error on held-out text) factors priced for rounding to nearest lower its error by 16% and raise
that of GPTQ by 27%; priced for GPTQ they lower that by 4%, by 10 to 15% where channels differ most, and raise it
nowhere by more than 0.5%.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from compress.solver import factorize
from compress.stats import InputStats
from compress.transform import Rounding, tie

NEEDS = frozenset({"mean_abs", "hessian"})

_WIDEST = 10 * torch.log(torch.tensor(2.0)).item()  # |log s| at most: a factor of 1024 either way


class Config(BaseModel):
    """grid_points: exponents tried per search. rows: output rows of each weight, evenly spread, that price a scale."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    grid_points: int = Field(default=20, ge=1)
    rows: int = Field(default=256, ge=1)


def scale(
    weights: Sequence[Tensor],
    stats: InputStats,
    rounding: Rounding | None,
    config: Config,
    sources: Tensor | None = None,
) -> Tensor:
    """The factor s [K] for the input columns of `weights` (each float32 [N, K]) that read the inputs of `stats`.

    sources: per column the producer output it reads; columns of one output get one factor. Channels that were never
    active, or whose weights are all zero, keep the factor 1, which is also the geometric mean of the others.
    """
    if rounding is None:
        raise ValueError("awq prices scales by the rounding that follows: it needs a quantize stage behind it")
    if stats.hessian is None or stats.mean_abs is None:
        raise ValueError("awq needs the Hessian and the mean magnitudes of its inputs")
    metric, size = _cost_of_errors(stats.hessian, stats.mean_abs, rounding.damping)
    energy = torch.stack([weight.square().mean(0) for weight in weights]).mean(0)
    alive = (tie(stats.mean_abs, sources) > 0) & (tie(energy, sources) > 0)
    activation = _log_magnitude(tie(size, sources), alive)
    weight_size = _log_magnitude(tie(energy, sources).sqrt(), alive)
    sample = torch.cat([_spread(weight, config.rows) for weight in weights])

    def factors(a: float, b: float) -> Tensor:
        return (a * activation - b * weight_size).clamp_(-_WIDEST, _WIDEST).exp_()

    def loss(exponents: tuple[float, float]) -> float:
        return _loss(sample, factors(*exponents), metric, rounding)

    grid = [point / config.grid_points for point in range(config.grid_points)]
    a, b = min([(point, point) for point in grid], key=loss)
    a, b = min([(a, b), *((a, point) for point in grid)], key=loss)
    return factors(a, b)


def _cost_of_errors(hessian: Tensor, mean_abs: Tensor, damping: float | None) -> tuple[Tensor, Tensor]:
    """What weight errors cost (the Hessian [K, K], or [K] where errors are compensated), and the size of channels [K].

    Compensated errors are priced in the order of falling energy in which the solver visits columns.
    """
    if damping is None:
        return hessian, mean_abs
    order = hessian.diagonal().argsort(descending=True, stable=True)
    factor = factorize(hessian, damping, order)
    if factor is None:  # The solver will not manage either, and round to nearest.
        return hessian, mean_abs
    pivots = torch.empty_like(mean_abs)
    pivots[order] = factor.upper.diagonal().square().reciprocal()
    return pivots, pivots.sqrt()


def _loss(weight: Tensor, factors: Tensor, metric: Tensor, rounding: Rounding) -> float:
    """The output error of rounding `weight` [N, K] with its columns scaled by `factors` [K], under `metric`."""
    if metric.dim() == 1:
        error = rounding.nearest(weight * factors, metric / factors.square()) / factors - weight
        return float(error.square().sum(0) @ metric)
    error = rounding.nearest(weight * factors, None) / factors - weight
    return float(torch.linalg.vecdot(error @ metric, error).sum())


def _log_magnitude(values: Tensor, alive: Tensor) -> Tensor:
    """log(values) [K] about its mean over the channels that are `alive`; 0 for the others."""
    logs = torch.where(alive, values, torch.ones_like(values)).log()
    return torch.where(alive, logs - logs.sum() / alive.sum().clamp(min=1), torch.zeros_like(logs))


def _spread(weight: Tensor, rows: int) -> Tensor:
    """At most `rows` rows of `weight`, evenly spread."""
    return weight[:: -(-len(weight) // rows)]
