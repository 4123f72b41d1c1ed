"""Round to nearest: every weight to the nearest point of its group's grid. No calibration; what others must beat."""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from compress.formats.grid import Grid
from compress.quantize import Solved
from compress.quantize.scales import Search, nearest
from compress.stats import InputStats

NEEDS: frozenset[str] = frozenset()


class Config(BaseModel):
    """search: "mse" clips where that lowers the squared error of the weights, "minmax" never clips."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    search: Search = "mse"


def quantize(weight: Tensor, stats: InputStats | None, grid: Grid, config: Config, scale_dtype: torch.dtype) -> Solved:
    """Put `weight` float32 [N, K] on `grid`, its scales in `scale_dtype`. `stats` has no say."""
    return Solved(nearest(weight, grid, config.search, scale_dtype))
