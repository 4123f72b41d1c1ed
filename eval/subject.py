"""What an evaluation looks at: a checkpoint's files with their manifest, and the model and tokenizer made of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.checkpoint import Checkpoint, manifest, open_checkpoint
from compress.checkpoint.manifest import Manifest
from compress.checkpoint.quantization_config import stored_schemes
from compress.checkpoint.tokenizer import load_tokenizer
from compress.formats.scheme import Scheme
from compress.runtime.load import DEFAULT, Execution, Model, load_model


@dataclass(frozen=True)
class Stored:
    """What a checkpoint's files tell before a weight is read. schemes: of its compressed linear layers, by module name.

    manifest: None for a checkpoint that lmpress did not write.
    """

    checkpoint: Checkpoint
    schemes: dict[str, Scheme]
    manifest: Manifest | None


@dataclass(frozen=True)
class Subject:
    """A checkpoint that is ready to be measured."""

    stored: Stored
    model: Model
    tokenizer: Any


def open_stored(folder: Path) -> Stored:
    """Read the headers in `folder`. Raises InputError for a folder that is broken or whose manifest does not fit."""
    checkpoint = open_checkpoint(folder)
    return Stored(checkpoint, stored_schemes(checkpoint), read_manifest(checkpoint))


def open_subject(folder: Path, device: str, execution: Execution = DEFAULT) -> Subject:
    """Load the checkpoint in `folder` onto `device`. Raises InputError for a folder that is broken or cannot be run."""
    stored = open_stored(folder)
    return Subject(stored, load_model(stored.checkpoint, device, execution=execution), load_tokenizer(folder))


def read_manifest(checkpoint: Checkpoint) -> Manifest | None:
    """The manifest of a checkpoint that lmpress wrote, checked against its shards; None for any other checkpoint."""
    if not (checkpoint.folder / manifest.NAME).exists():
        return None
    told = manifest.read(checkpoint.folder)
    manifest.check(told, checkpoint)
    return told
