"""Schemes: a weight grid, what becomes of activations, and a format, under the names of compressed-tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from compress.errors import USAGE, InputError, did_you_mean
from compress.formats import sparse24
from compress.formats.grid import FLOAT_BITS, Grid
from compress.formats.pattern import Pattern


@dataclass(frozen=True)
class Scheme:
    """How one linear layer is stored and run.

    activation_bits: 8 when inputs are quantized per token at run time, else None. threshold: the magnitude from which
    an activation counts as an outlier (LLM.int8(): 6.0), None for schemes without outlier columns. pattern: what
    pruning leaves of a row, None for dense weights.
    """

    name: str
    grid: Grid
    format: str
    activation_bits: int | None = None
    threshold: float | None = None
    pattern: Pattern | None = None


SCHEMES = {
    "W4A16": Scheme("W4A16", Grid(4, True, 128), "pack-quantized"),
    "W4A16_ASYM": Scheme("W4A16_ASYM", Grid(4, False, 128), "pack-quantized"),
    "W8A16": Scheme("W8A16", Grid(8, True, 128), "pack-quantized"),
    "W8A8": Scheme("W8A8", Grid(8), "int-quantized", activation_bits=8),
    "LLM_INT8": Scheme("LLM_INT8", Grid(8), "int8-outlier", activation_bits=8, threshold=6.0),
}


# What a pruned weight is whose values stay floats. No layer gets it by name: a prune stage makes it.
FLOATS = Scheme("W16A16", Grid(FLOAT_BITS), "dense")


def pruned(scheme: Scheme, pattern: Pattern) -> Scheme:
    """`scheme` with weights that follow `pattern`: 2:4 in the format of kept values alone, others as they were."""
    stored = sparse24.NAME if pattern == sparse24.PATTERN else scheme.format
    return replace(scheme, name=f"{scheme.name}+{pattern}", format=stored, pattern=pattern)


def scheme_named(name: str, group_size: int | Literal["channel"] | None = None) -> Scheme:
    """The scheme called `name`, with its group size replaced where one is given.

    Raises InputError for an unknown name, a group size that is not positive, or one given to a row-wise scheme.
    """
    if name not in SCHEMES:
        raise InputError(
            f"scheme: {name!r} is not known{did_you_mean(name, SCHEMES)} Known: {', '.join(SCHEMES)}", USAGE
        )
    scheme = SCHEMES[name]
    if group_size is None:
        return scheme
    if group_size == "channel":
        return replace(scheme, grid=replace(scheme.grid, group_size=None))
    if scheme.grid.group_size is None:
        raise InputError(f"group_size: {group_size} given, but {name} has one scale per row: leave it out", USAGE)
    if group_size < 1:
        raise InputError(f"group_size: {group_size} is not positive: give 32, 64, 128 or 'channel'", USAGE)
    return replace(scheme, grid=replace(scheme.grid, group_size=group_size))
