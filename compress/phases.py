"""Phases of a recipe: what is cut, compressed and trained in turn, each from one checkpoint folder to the next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from compress.recipe import Recipe
from compress.stage import SCOPED, Stage

COMPRESS, SHRINK, DISTILL = "compress", "shrink", "distill"


@dataclass(frozen=True)
class Past:
    """What a phase comes behind.

    recipe: the whole of it, as its user gave it. mark: a hash of all that decides the result, up to this phase. told: a
    row for each phase that cut or trained the model. source: of the model that the recipe names, as its manifest tells
    it; None for the first phase, which reads that model itself. nbytes: of that model's tensors.
    """

    recipe: Recipe
    mark: str
    told: tuple[dict[str, Any], ...] = ()
    source: dict[str, Any] | None = None
    nbytes: int | None = None


@dataclass(frozen=True)
class Phase:
    """Stages that are done together: `compress` and `shrink` take all that follow one another, `distill` takes one."""

    kind: str
    stages: tuple[Stage, ...]


def phases_of(stages: Iterable[Stage]) -> list[Phase]:
    """The phases of a recipe, in order."""
    found: list[Phase] = []
    for kind, run in groupby(stages, lambda stage: COMPRESS if stage.kind in SCOPED else stage.kind):
        row = tuple(run)
        found += [Phase(kind, (stage,)) for stage in row] if kind == DISTILL else [Phase(kind, row)]
    return found


def stages_folder(output: Path) -> Path:
    """Where what lies between phases is kept until the last of them is done: beside the output."""
    return output.parent / f"{output.name}.stages"


def part_of(recipe: Recipe, phase: Phase, model: Path, output: Path) -> Recipe:
    """The recipe of one phase, from one folder to the next; what it names by `{model}` is still the whole recipe's."""
    calibration = recipe.calibration.model_copy(update={"source": recipe.expand(recipe.calibration.source)})
    changes = {"stages": phase.stages, "model": str(model), "output": str(output), "calibration": calibration}
    return recipe.model_copy(update=changes)
