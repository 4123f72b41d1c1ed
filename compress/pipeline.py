"""Run a recipe: the only file that knows the order of things.

source -> skeleton -> assignment -> plan -> tokens -> walk over the blocks -> manifest -> rename.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from compress import outline, sensitivity
from compress.assignment import Assignment, assign
from compress.checkpoint import manifest, quantization_config
from compress.checkpoint.disk import explained
from compress.checkpoint.output import WORK, partial_folder, refuse_overlap, tidy
from compress.checkpoint.reader import Checkpoint, open_checkpoint
from compress.checkpoint.source import Dequantized, Source, dequantized
from compress.checkpoint.writer import Section, Writer, finished
from compress.distillation import distill, teacher_folder
from compress.errors import USAGE, InputError
from compress.model import Skeleton, build_skeleton
from compress.outcome import Outcome, Run, closing_files, fingerprint, outlier_bytes, read_outcome
from compress.phases import COMPRESS, DISTILL, SHRINK, Past, Phase, part_of, phases_of, stages_folder
from compress.plan import Plan, make_plan
from compress.recipe import Recipe
from compress.resident import bound_heap, release_memory
from compress.run_log import Logged, Observer
from compress.shrinking import shrink
from compress.tokens import SELF, Tokens, calibration_tokens
from compress.training.processes import is_main, main_first
from compress.walk import Walk


@dataclass(frozen=True)
class RunOptions:
    """How to run, beside what. device: auto, cpu or cuda. restart: drop what an earlier run left, finished or not.
    dequantize: accept a quantized source, as the float weights it stands for."""

    device: str = "auto"
    restart: bool = False
    dequantize: bool = False


@dataclass(frozen=True)
class Job:
    """A recipe bound to a model: everything that is known before a weight is read."""

    recipe: Recipe
    source: Source
    skeleton: Skeleton
    plan: Plan


def prepare(recipe: Recipe, dequantize: bool = False) -> Job:
    """Open the source, build its skeleton and plan what its walk over the blocks does.

    Raises InputError for whatever the recipe cannot do to it.
    """
    bound_heap()  # before the skeleton, whose parameters come and go
    source = _source_of(recipe, dequantize)
    skeleton = build_skeleton(source.folder)
    assignment = assign(recipe, skeleton)
    if isinstance(source, Dequantized):
        _refuse_pruned(source, assignment)
    return Job(recipe, source, skeleton, make_plan(recipe, source, skeleton, assignment))


def foresee(recipe: Recipe, dequantize: bool = False) -> tuple[Plan | None, list[str]]:
    """The plan of the walk over the blocks, and notes about all else that the recipe does. No weight is read.

    The plan is None where no stage compresses, or where the model that will be compressed is still to be made. Raises
    InputError as `run` would.
    """
    phases = phases_of(recipe.stages)
    source = _source_of(recipe, dequantize or phases[0].kind == DISTILL)
    outline.check(recipe, phases, source)
    told = outline.notes(recipe, phases, source)
    if phases[0].kind != COMPRESS:
        return None, told
    return prepare(recipe.model_copy(update={"stages": phases[0].stages}), dequantize).plan, told


def run(recipe: Recipe, options: RunOptions, observer: Observer) -> Outcome:
    """Do what the recipe says and leave a finished checkpoint in its output folder.

    The same call after a kill, whenever it came, goes on and ends in the same bytes. Raises InputError for bad input
    and for what the calibration data or the disk make impossible; nothing half-written is left under the output's name.
    """
    if recipe.output is None:
        raise InputError("recipe: field 'output' is missing: name the folder to write there or with --output", USAGE)
    output = Path(recipe.output)
    phases = phases_of(recipe.stages)
    # A distill stage takes a student on its grid as it is.
    source = _source_of(recipe, options.dequantize or phases[0].kind == DISTILL)
    refuse_overlap(output, source.folder)
    device = pick_device(options.device)
    teachers = [open_checkpoint(teacher_folder(recipe, stage)) for stage in recipe.stages if stage.kind == DISTILL]
    past = Past(recipe, fingerprint(recipe, [source, *teachers], device))
    folder = stages_folder(output)
    if finished(output, past.mark, options.restart):
        outcome = _checked(output)
        _tidy_up(output, folder)
        observer.event("complete", output=str(output))
        return outcome
    outline.check(recipe, phases, source)
    if is_main():
        observer = Logged(output, observer)
    with main_first():
        if options.restart and folder.exists() and is_main():
            shutil.rmtree(folder)
    model = source.folder
    for number, phase in enumerate(phases, start=1):
        last = number == len(phases)
        target = output if last else folder / f"{number}-{phase.kind}"
        here = past if last else replace(past, mark=f"{past.mark} {number}")
        outcome = _run_phase(phase, part_of(recipe, phase, model, target), here, options, observer)
        told = outcome.manifest
        past = replace(past, told=tuple(told.phases), source=told.source, nbytes=told.size["bytes_baseline"])
        model = target
    _tidy_up(output, folder)
    observer.event("finished", output=str(output))
    return outcome


def _checked(output: Path) -> Outcome:
    """The outcome in a finished folder. Raises InputError where the folder was changed since."""
    outcome = read_outcome(output)
    manifest.check(outcome.manifest, open_checkpoint(output))
    return outcome


def _tidy_up(output: Path, folder: Path) -> None:
    """Remove what only an unfinished run needs, from the output and beside it."""
    with main_first(), explained(output):
        tidy(output)
        if folder.exists():
            shutil.rmtree(folder)


def _run_phase(phase: Phase, part: Recipe, past: Past, options: RunOptions, observer: Observer) -> Outcome:
    """One phase of a recipe, from the folder that `part` names as its model to its output, unless it is done already.

    Of several processes one works, but where a student is trained.
    """
    device, output = pick_device(options.device), Path(str(part.output))
    if finished(output, past.mark, options.restart):
        return read_outcome(output)
    if phase.kind == DISTILL:
        return distill(part, past, device, options.restart, observer)
    with main_first():
        if not is_main():
            return read_outcome(output)
        if phase.kind == SHRINK:
            return shrink(part, past, device, options.restart, observer)
        return _compress(part, past, options, observer)


def _compress(recipe: Recipe, past: Past, options: RunOptions, observer: Observer) -> Outcome:
    """The phase that walks the blocks: transforms, pruning and quantization."""
    output = Path(str(recipe.output))
    job = prepare(recipe, options.dequantize)
    device = pick_device(options.device)
    # A named text is read before anything is created, so that its mistakes leave nothing behind.
    sparing = any(stage.keep_dense for stage in recipe.stages)
    calibrated = job.plan.assignment.needs_calibration
    named = calibrated and recipe.calibration.source != SELF
    tokens = _tokens(job, device, output, observer) if named else None
    if sparing:
        tokens = tokens or _tokens(job, device, output, observer)
        job = _with_dense(job, _most_sensitive(job, tokens, device, observer))
    sections = [Section(name, parts) for name, parts in job.plan.sections]
    shard_bytes = recipe.export.shard_bytes
    writer = Writer(output, sections, past.mark, shard_bytes, options.restart, room=job.plan.disk_bytes)
    done = len(set(writer.done) & set(job.skeleton.blocks))
    observer.event("started", blocks=len(job.skeleton.blocks), done=done, device=str(device))
    if calibrated and tokens is None:
        tokens = _tokens(job, device, output, observer)
    if tokens is not None:
        observer.event("tokens", **tokens.description)
    records = Walk(job.source, job.skeleton, job.plan, writer, device, observer).run(tokens if calibrated else None)
    result = Run(recipe, job.source, job.plan, tokens, writer.tensors, writer.sha256, records, device, past)
    writer.finish(closing_files(result), job.plan.bytes_after + outlier_bytes(result))
    return read_outcome(output)


def _most_sensitive(job: Job, tokens: Tokens, device: torch.device, observer: Observer) -> dict[str, float]:
    """The layers that pruning hurts most, found anew by every run: the same tokens and device give the same.

    Raises InputError for a quantized source, which the measurement cannot prune.
    """
    if isinstance(job.source, Dequantized):
        raise InputError(
            "prune.keep_dense: is measured on a float model, and this one is quantized: leave it out", USAGE
        )
    found = sensitivity.measure(
        job.source.folder,
        job.plan.assignment,
        tokens.ids,
        device,
        lambda done, total: observer.event("sensitivity", done=done, total=total),
    )
    release_memory(device)
    return sensitivity.most_sensitive(found, job.plan.assignment)


def _with_dense(job: Job, dense: dict[str, float]) -> Job:
    """The job with the layers `dense` (name -> KL divergence when pruned alone) not pruned."""
    assignment = assign(job.recipe, job.skeleton, dense)
    return replace(job, plan=make_plan(job.recipe, job.source, job.skeleton, assignment))


def _tokens(job: Job, device: torch.device, output: Path, observer: Observer) -> Tokens:
    """The calibration tokens. Raises InputError where one of them has no row in the embedding."""
    work = partial_folder(output) / WORK
    tokens = calibration_tokens(
        job.recipe, job.source, work, device, lambda done, total: observer.event("sampling", done=done, total=total)
    )
    name, embedding = job.skeleton.embedding()
    rows, largest = embedding.num_embeddings, int(tokens.ids.max())
    if largest >= rows:
        raise InputError(
            f"calibration: token {largest} is beyond the {rows} rows of {name}.weight: the tokenizer in "
            f"{job.source.folder} belongs to another model: put the right one there"
        )
    return tokens


def pick_device(wish: str) -> torch.device:
    """The device that blocks are worked on. Raises InputError where cuda is asked for and absent."""
    if wish not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device: {wish!r} is not known: give auto, cpu or cuda", USAGE)
    if wish == "cuda" and not torch.cuda.is_available():
        raise InputError("--device: cuda is asked for, but torch sees no GPU: give cpu, or install a CUDA build", USAGE)
    return torch.device("cuda" if wish != "cpu" and torch.cuda.is_available() else "cpu")


def _refuse_pruned(source: Dequantized, assignment: Assignment) -> None:
    """Raise InputError where a layer that a recipe prunes was pruned before: its zeros would count as small weights."""
    for name, task in assignment.layers.items():
        scheme = source.schemes.get(name)
        if task.prune is not None and scheme is not None and scheme.pattern is not None:
            raise InputError(
                f"{task.prune.where}: {name} is pruned to {scheme.pattern} already in {source.folder}: start from the "
                "float model",
                USAGE,
            )


def _source_of(recipe: Recipe, dequantize: bool) -> Source:
    """The model that a recipe starts from. Raises InputError where it names none, or a quantized one unasked."""
    if recipe.model is None:
        raise InputError("recipe: field 'model' is missing: name the model's folder there or with --model", USAGE)
    folder = Path(recipe.model)
    checkpoint: Checkpoint = open_checkpoint(folder)
    if checkpoint.quantization is None:
        return checkpoint
    if not dequantize:
        what = quantization_config.describe(checkpoint.config)
        raise InputError(
            f"{folder / 'config.json'}: the model is already quantized ({what}): give the float model, or --dequantize "
            "to go on from what these weights stand for"
        )
    schemes = quantization_config.stored_schemes(checkpoint)
    dtype = getattr(torch, str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "bfloat16"))
    return dequantized(checkpoint, schemes, dtype)
