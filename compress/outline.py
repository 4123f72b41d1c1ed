"""What the phases of a recipe will do, told and checked before a weight is read or a folder is made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from compress.assignment import assign
from compress.checkpoint.source import Source
from compress.distill.block_output import Config as BlockOutput
from compress.distillation import check as check_distillation
from compress.distillation import teacher_folder
from compress.errors import USAGE, InputError
from compress.model import build_skeleton
from compress.phases import COMPRESS, DISTILL, SHRINK, Phase
from compress.recipe import Recipe
from compress.stage import Stage
from compress.training.cut import config_of, describe

# Bytes per parameter of a student in training: float32 weights, gradients, two moments of AdamW, weights on their grid;
# and of its teacher.
TRAINED_BYTES, TAUGHT_BYTES = 20, 4


def check(recipe: Recipe, phases: Sequence[Phase], source: Source) -> None:
    """Raise InputError for phases that cannot follow one another, and for what shrink and distill stages cannot do.

    A compress phase behind a shrink phase is matched against the student that will be there.
    """
    compressed = False
    for number, phase in enumerate(phases):
        stage = phase.stages[0]
        if compressed and phase.kind != DISTILL:
            raise InputError(
                f"{stage.where}: an earlier stage has put weights on their grid, and a distill stage stands between: "
                f"put the {stage.kind} stage in front of it",
                USAGE,
            )
        compressed = compressed or phase.kind == COMPRESS
        cuts = [cut for earlier in phases[:number] if earlier.kind == SHRINK for cut in earlier.stages]
        if phase.kind == SHRINK:
            describe(source.folder, [*cuts, *phase.stages])
        elif phase.kind == DISTILL:
            _check_teacher(stage, teacher_folder(recipe, stage), source, alone=number == 0)
        elif cuts:
            _check_behind(recipe.model_copy(update={"stages": phase.stages}), cuts, source)


def notes(recipe: Recipe, phases: Sequence[Phase], source: Source) -> list[str]:
    """A line for each phase that cuts or trains the whole model: sizes, steps, tokens, memory."""
    told = []
    for phase in phases:
        if phase.kind == SHRINK:
            sizes = describe(source.folder, phase.stages)
            weights, cache = sizes["parameters"], sizes["kv_bytes_per_token"]
            told.append(
                f"shrink by {', '.join(stage.method for stage in phase.stages)}: {weights['before']:,} -> "
                f"{weights['after']:,} parameters, key-value cache {cache['before']:,} -> {cache['after']:,} bytes per "
                "token"
            )
        if phase.kind == DISTILL:
            told.append(_training_note(recipe, phase.stages[0]))
    return told


def _training_note(recipe: Recipe, stage: Stage) -> str:
    data, training = stage.distilling.data, stage.distilling.training
    teacher = f"teacher {teacher_folder(recipe, stage)}, {stage.distilling.teacher.signal}"
    if isinstance(stage.settings, BlockOutput):
        extent = f"{stage.settings.epochs} epochs of {data.sequences} x {data.seqlen} tokens, one block in memory"
        return f"distill by {stage.method}: {extent}; {teacher}"
    rows = training.steps * training.batch * training.accumulation
    losses = ", ".join(term.method for term in stage.terms)
    extent = f"{training.steps} steps, {rows:,} sequences of {data.seqlen} tokens ({rows * data.seqlen:,} tokens)"
    memory = f"{TRAINED_BYTES} bytes per parameter of the student and {TAUGHT_BYTES} of the teacher, beside activations"
    return f"distill by {losses}: {extent}; {teacher}; memory {memory}"


def _check_teacher(stage: Stage, teacher: Path, source: Source, alone: bool) -> None:
    """Raise InputError for a distill stage that cannot be taught; `alone`: nothing comes before it."""
    if alone and teacher == source.folder:
        raise InputError(
            f"{stage.where}.distill.teacher.model: is missing, and the recipe's own model is the student: name the "
            "folder of the model to learn from",
            USAGE,
        )
    check_distillation(stage, teacher, source.folder)


def _check_behind(part: Recipe, cuts: Sequence[Stage], source: Source) -> None:
    """Raise InputError for stages that cannot be done to the student that `cuts` leave."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_of(source.folder, cuts)), encoding="utf-8")
        assign(part, build_skeleton(Path(folder)))
