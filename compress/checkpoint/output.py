"""Output folders: whose they are, and the one step in which a finished checkpoint takes its name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from compress.checkpoint.disk import explained, sync_folder
from compress.checkpoint.header import read_header
from compress.errors import InputError

FINGERPRINT = "lmpress_fingerprint"  # key in the metadata of our shards
JOURNAL = "journal.jsonl"
WORK = "work"  # what a run keeps for its own resumption: spilled activations, text that the model wrote
REPLACED = "replaced"  # where an output that is being replaced waits inside the partial folder


def refuse_overlap(output: Path, model: Path) -> None:
    """Raise InputError if one of the folders `output` and `model` is, or lies inside, the other or its partial."""
    model = Path(os.path.realpath(model))
    target = Path(os.path.realpath(output))
    for ours in (target, partial_folder(target)):
        if ours == model or ours.is_relative_to(model) or model.is_relative_to(ours):
            raise InputError(f"output: {output} overlaps the model folder {model}: give a folder outside it")


def partial_folder(output: Path) -> Path:
    """Where an unfinished checkpoint lives: beside the output, so that a rename can finish it."""
    return output.parent / f"{output.name}.partial"


def is_finished(output: Path, fingerprint: str, restart: bool) -> bool:
    """Whether `output` already holds the finished checkpoint with this fingerprint; False if it is free to be written.

    With `restart`, another checkpoint of ours counts as free: `publish` replaces it. Raises InputError for a folder
    with anything else in it, which is never touched.
    """
    with explained(output):
        if not output.exists():
            return False
        if not output.is_dir():
            raise InputError(f"{output}: is a file: give another output folder")
        if not any(output.iterdir()):
            return False
    owner = _fingerprint_of(output)
    if owner is None:
        raise InputError(f"{output}: is not empty and was not written by lmpress: give another output folder")
    if restart:
        return False
    if owner != fingerprint:
        raise InputError(
            f"{output}: holds the result of another recipe or model: give another output folder, or --restart to "
            "replace it"
        )
    return True


def publish(partial: Path, output: Path) -> None:
    """Give the finished folder `partial` the name `output`, moving a checkpoint of that name out of the way.

    The new folder has its name in one step, and only when whole. Raises OSError.
    """
    if output.exists() and any(output.iterdir()):
        os.replace(output, partial / REPLACED)
    os.replace(partial, output)
    sync_folder(output.parent)
    tidy(output)


def tidy(output: Path) -> None:
    """Remove what only an unfinished run needs; after a kill just before this, the next run does. Raises OSError."""
    for name in (REPLACED, WORK):
        if (output / name).exists():
            shutil.rmtree(output / name)
    if (output / JOURNAL).exists():
        os.unlink(output / JOURNAL)
        sync_folder(output)


def clear(partial: Path) -> None:
    """Remove everything in `partial` but the journal. Raises OSError."""
    for path in partial.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != JOURNAL:
            os.unlink(path)


def _fingerprint_of(output: Path) -> str | None:
    shards = sorted(output.glob("model*.safetensors"))
    if not shards:
        return None
    try:
        return read_header(shards[0]).metadata.get(FINGERPRINT)
    except InputError:
        return None
