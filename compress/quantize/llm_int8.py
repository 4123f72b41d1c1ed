"""LLM.int8() (arXiv 2208.07339): int8 rows, with the few input channels that carry outliers kept in 16 bit.

The decomposition is section 3.2's, which takes a channel out of a batch as soon as one of its values reaches 6.0. Here
calibration finds the channels once: those that reach the threshold in at least a share of the tokens. (Section 4.1 asks
for 6% of them where it counts emergent outliers; what is rarer than that still costs a token its precision.)
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from compress.formats.grid import Grid, Quantized
from compress.quantize import Solved
from compress.quantize.scales import nearest
from compress.stats import InputStats

NEEDS = frozenset({"outliers"})


class Config(BaseModel):
    """threshold: the magnitude that makes an outlier; 6.0 suits models of 6.7B and more, whose normalized activations
    are near 1, and a small model with smaller ones wants less. share: of tokens in which a channel must reach it.
    max_columns: most channels kept in 16 bit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    threshold: float = Field(default=6.0, gt=0)
    share: float = Field(default=0.005, gt=0, le=1)
    max_columns: int | None = Field(default=None, ge=0)


def quantize(weight: Tensor, stats: InputStats | None, grid: Grid, config: Config, scale_dtype: torch.dtype) -> Solved:
    """int8 rows of `weight` float32 [N, K], scaled by their absmax without the outlier columns, and those columns.

    Where more channels meet the criterion than `max_columns` allows, those with the greatest share are kept and
    `fallback` names the count.
    """
    if stats is None or stats.outlier_share is None:
        raise ValueError("llm_int8 needs the outlier share of its inputs")
    share = stats.outlier_share
    columns = (share >= config.share).nonzero().flatten()
    fallback = None
    if config.max_columns is not None and len(columns) > config.max_columns:
        fallback = f"{len(columns)} outlier columns found, {config.max_columns} kept: max_columns allows no more"
        strongest = share[columns].argsort(descending=True, stable=True)[: config.max_columns]
        columns = columns[strongest].sort().values
    kept = weight[:, columns].to(scale_dtype)
    regular = weight.index_fill(1, columns, 0.0)
    rows = nearest(regular, grid, "minmax", scale_dtype)
    return Solved(
        Quantized(rows.q, rows.scale, outlier_columns=columns.to(torch.int32), outlier_weight=kept), fallback=fallback
    )
