"""Random weights with a random 2:4 mask, for tests of kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from compress.formats.grid import FLOAT_BITS, Grid, Quantized
from compress.formats.pattern import keep_largest
from compress.formats.sparse24 import PATTERN


def prune(weight: Quantized, generator: torch.Generator) -> Quantized:
    """`weight` with two of every four columns kept, at random: never those that are zero anyway."""
    mask = keep_largest(torch.rand(weight.q.shape, generator=generator), PATTERN)
    return replace(weight, q=weight.q.masked_fill(~mask, 0), mask=mask)


def random_pruned(rows: int, columns: int, grid: Grid, generator: torch.Generator) -> Quantized:
    """Integers over the whole grid, zero among what is kept, and bfloat16 scales of both signs; or bfloat16 floats."""
    if grid.bits == FLOAT_BITS:
        values = torch.randn(rows, columns, generator=generator).to(torch.bfloat16)
        return prune(Quantized(values, torch.ones(rows, 1)), generator)
    q = torch.randint(grid.minimum, grid.maximum + 1, (rows, columns), generator=generator).to(torch.int8)
    scale = torch.randn(rows, grid.groups(columns), generator=generator).mul(0.01).to(torch.bfloat16)
    return prune(Quantized(q, scale), generator)
