"""The distill phase: a student in one folder, trained towards a teacher in another, becomes a checkpoint in a third."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from compress import methods
from compress.checkpoint import Checkpoint, TensorInfo, Writer, manifest, open_checkpoint
from compress.checkpoint.manifest import Manifest
from compress.checkpoint.source import identity
from compress.distill import HIDDEN_STATES, block_output
from compress.distill.distributions import refuse_temperature
from compress.distill.hidden_states import refuse_layers
from compress.errors import USAGE, InputError
from compress.kernels.exported import FOLDER as KERNELS
from compress.model import build_skeleton
from compress.model_card import model_card
from compress.outcome import Outcome, float_manifest, read_outcome, recipe_fields
from compress.phases import Past, stages_folder
from compress.recipe import Recipe
from compress.run_log import Observer
from compress.stage import Stage
from compress.training.blocks import open_pair, recover_blocks
from compress.training.data import Sequences, sequences_of
from compress.training.loop import History, Lesson, Place, train
from compress.training.network import Network, load_network
from compress.training.processes import is_main, main_first
from compress.training.save import copied_files, write_trained
from compress.training.student import load_student
from compress.training.teacher import OfflineTeacher, OnlineTeacher, Signal, refuse_other_tokenizer, write_cache
from compress.training.topk_cache import CacheKey, is_cached, open_cache
from compress.training_settings import Training

Files = dict[str, str | bytes | Path]
# Tensors as written, and the sha256 of their bytes.
Written = tuple[Mapping[str, TensorInfo], Mapping[str, str]]


@dataclass(frozen=True)
class Folders:
    """Where a distill phase finds and leaves things. work: states and what the teacher wrote, for a resumed run."""

    student: Path
    teacher: Path
    output: Path
    work: Path
    cache: Path


def teacher_folder(recipe: Recipe, stage: Stage) -> Path:
    """The folder of a distill stage's teacher: by default the model that the whole recipe starts from."""
    return Path(recipe.expand(stage.distilling.teacher.model or "{model}"))


def folders_of(part: Recipe, past: Past) -> Folders:
    """The folders of the distill phase `part`."""
    stage, output = part.stages[0], Path(str(past.recipe.output))
    cache = stage.distilling.teacher.cache or str(output.parent / f"{output.name}.teacher")
    return Folders(
        student=Path(str(part.model)),
        teacher=teacher_folder(past.recipe, stage),
        output=Path(str(part.output)),
        work=stages_folder(output) / f"{len(past.told) + 1}-training",
        cache=Path(past.recipe.expand(cache)),
    )


def distill(part: Recipe, past: Past, device: torch.device, restart: bool, observer: Observer) -> Outcome:
    """Train the student in `part.model` as its one stage says, and write it to `part.output`.

    A run that was interrupted goes on from its last state. Raises InputError for data that is missing or too short, a
    loss that is no longer finite, and a disk that is full.
    """
    stage, folders = part.stages[0], folders_of(part, past)
    folders.work.mkdir(parents=True, exist_ok=True)
    with main_first():
        sequences, held_out = _sequences(stage, past.recipe, folders, device, observer)
    observer.event("tokens", **sequences.description)
    if isinstance(stage.settings, block_output.Config):
        with main_first():
            return _by_blocks(stage, folders, sequences, past, Worker(device, restart and is_main(), observer))
    student = load_student(folders.student, stage.distilling.training, device)
    teacher_vocabulary = build_skeleton(folders.teacher).dimensions.vocab_size
    vocabulary = min(student.network.vocabulary, teacher_vocabulary)
    with main_first():
        signal = _signal(stage, folders, sequences, (student.network, vocabulary), observer)
    lesson = Lesson(sequences, held_out, signal, stage.terms, vocabulary)
    place = Place(folders.work, f"{past.mark} {sequences.sha256}")
    history = train(student, lesson, stage.distilling.training, place, observer)
    row = _told(stage, lesson, history)

    def closing(tensors: Mapping[str, TensorInfo], sha256: Mapping[str, str]) -> Files:
        return _closing_files(student.source, past, row, (tensors, sha256))

    with main_first():
        # Only one of several processes replaces an earlier output: the others find the new one.
        write_trained(student, folders.output, past.mark, closing, restart and is_main())
    return read_outcome(folders.output)


@dataclass(frozen=True)
class Worker:
    """How a phase is worked on, beside what. restart: drop what an earlier run left."""

    device: torch.device
    restart: bool
    observer: Observer


def _by_blocks(stage: Stage, folders: Folders, sequences: Sequences, past: Past, worker: Worker) -> Outcome:
    """Train the student block by block; no whole model is in memory."""
    assert isinstance(stage.settings, block_output.Config)
    pair = open_pair(folders.student, folders.teacher)
    writer = Writer(folders.output, list(pair.sections.values()), past.mark, restart=worker.restart)
    if not writer.complete:
        rows = recover_blocks(pair, sequences.ids, stage.settings, writer, worker.device, worker.observer)
        row = {
            "kind": "distill",
            "method": stage.method,
            "settings": stage.settings.model_dump(mode="json"),
            "data": sequences.description,
            "blocks": [one.durable() for one in rows],
        }
        writer.finish(_closing_files(pair.student, past, row, (writer.tensors, writer.sha256)))
    return read_outcome(folders.output)


def check(stage: Stage, teacher: Path, student: Path) -> None:
    """Raise InputError for what can be known to fail before the student is there. student: a folder with its tokenizer.

    Losses that an offline teacher cannot serve, a teacher that is missing, and one with another tokenizer.
    """
    if any(isinstance(term.settings, block_output.Config) for term in stage.terms):
        _refuse_beside_blocks(stage)
    offline = stage.distilling.teacher.signal == "offline"
    for term in stage.terms:
        needs = methods.find("distill", term.method).NEEDS
        if offline and HIDDEN_STATES in needs:
            raise InputError(
                f"{stage.where}.distill: {term.method} needs hidden states, and an offline teacher keeps none: set "
                "teacher.signal to online",
                USAGE,
            )
        if offline:
            refuse_temperature(getattr(term.settings, "temperature", 1.0))
    open_checkpoint(teacher)
    refuse_other_tokenizer(student, teacher)


def _refuse_beside_blocks(stage: Stage) -> None:
    """Raise InputError for settings of a block-by-block stage that only a training of the whole model heeds."""
    told = stage.distilling
    other = {
        "mix": bool(told.mix),
        "data.records": told.data.records,
        "teacher.signal": told.teacher.signal == "offline",
        "training": told.training != Training(),
    }
    found = next((name for name, given in other.items() if given), None)
    if found is not None:
        raise InputError(
            f"{stage.where}.distill.{found}: has no meaning for block_output, which trains one block at a time by its "
            "own settings: leave it out, or give it a stage of its own",
            USAGE,
        )


def _sequences(
    stage: Stage, recipe: Recipe, folders: Folders, device: torch.device, observer: Observer
) -> tuple[Sequences, int]:
    """All sequences of a stage, those that are held out last, and how many those are."""
    data = stage.distilling.data
    found = sequences_of(
        data,
        recipe.expand(data.source),
        folders.teacher,
        device,
        folders.work / "sequences.safetensors",
        lambda done, total: observer.event("sampling", done=done, total=total),
    )
    return found, data.held_out * found.group


def _signal(
    stage: Stage, folders: Folders, sequences: Sequences, student: tuple[Network, int], observer: Observer
) -> Signal:
    """The teacher's side of a lesson. student: its network, and the tokens that both know.

    A teacher whose word is on the disk already is not loaded.
    """
    settings, (network, vocabulary) = stage.distilling.teacher, student
    device = next(network.parameters()).device
    if settings.signal == "online":
        teacher = load_network(folders.teacher, device)
        _refuse_depth(stage, network, teacher)
        return OnlineTeacher(teacher, vocabulary)
    key = CacheKey(identity(open_checkpoint(folders.teacher)), sequences.sha256, settings.top_k, vocabulary)
    if not is_cached(folders.cache, key):
        write_cache(
            folders.cache,
            key,
            OnlineTeacher(load_network(folders.teacher, device), vocabulary),
            sequences,
            lambda done, total: observer.event("caching", done=done, total=total),
        )
    return OfflineTeacher(open_cache(folders.cache, key), device)


def _refuse_depth(stage: Stage, student: Network, teacher: Network) -> None:
    """Raise InputError for a layer map that the two networks do not have."""
    for term in stage.terms:
        if HIDDEN_STATES in methods.find("distill", term.method).NEEDS:
            refuse_layers(term.settings, student.layers, teacher.layers, student.width, teacher.width)  # type: ignore[arg-type]


def _told(stage: Stage, lesson: Lesson, history: History) -> dict[str, Any]:
    """What a manifest says of a training: nothing that differs between two runs of it."""
    return {
        "kind": "distill",
        "method": stage.method,
        "terms": [term.resolved() for term in stage.terms],
        "teacher": stage.distilling.teacher.model_dump(mode="json"),
        "data": {**lesson.sequences.description, "held_out": lesson.held_out},
        "training": stage.distilling.training.model_dump(mode="json"),
        "losses": history.losses,
        "held_out": [list(row) for row in history.held_out],
        "tokens": history.tokens,
        "stopped": history.stopped,
    }


def _closing_files(student: Checkpoint, past: Past, row: dict[str, Any], written: Written) -> Files:
    """What lies beside the weights of a trained checkpoint: what its source has, the manifest and the model card."""
    told = _manifest(student, past, row, written)
    files = copied_files(student) | _kernels(student.folder)
    return files | {manifest.NAME: manifest.encode(told), "README.md": model_card(told)}


def _manifest(student: Checkpoint, past: Past, row: dict[str, Any], written: Written) -> Manifest:
    """The manifest of a trained checkpoint: its source's, where that is compressed, with what training has changed."""
    plain = float_manifest(past, student, *written, row)
    if not (student.folder / manifest.NAME).exists():
        return plain
    earlier = manifest.read(student.folder)
    # What the walk measured of a layer is no longer true of it.
    layers = [{**layer, "method": f"{layer['method']}+{row['method']}", "error_db": None} for layer in earlier.layers]
    return replace(earlier, **recipe_fields(past.recipe), layers=layers, tensors=plain.tensors, phases=plain.phases)


def _kernels(folder: Path) -> Files:
    """The kernels that a compressed student carries: trained weights of the same formats run on the same ones."""
    found = sorted(file for file in (folder / KERNELS).rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file for file in found}
