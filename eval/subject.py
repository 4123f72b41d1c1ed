"""What an evaluation looks at: a checkpoint folder, the model that runs it, its tokenizer and its manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.checkpoint import Checkpoint, manifest, open_checkpoint
from compress.checkpoint.manifest import Manifest
from compress.checkpoint.quantization_config import parse
from compress.checkpoint.tokenizer import load_tokenizer
from compress.formats.scheme import Scheme
from compress.runtime.load import Model, load_model


@dataclass(frozen=True)
class Subject:
    """A checkpoint that is ready to be measured. schemes: of its compressed linear layers, by module name."""

    checkpoint: Checkpoint
    model: Model
    tokenizer: Any
    schemes: dict[str, Scheme]
    manifest: Manifest | None


def open_subject(folder: Path, device: str) -> Subject:
    """Load the checkpoint in `folder` onto `device`. Raises InputError for a folder that is broken or cannot be run."""
    checkpoint = open_checkpoint(folder)
    schemes, told = schemes_of(checkpoint), read_manifest(checkpoint)
    return Subject(checkpoint, load_model(folder, device), load_tokenizer(folder), schemes, told)


def read_manifest(checkpoint: Checkpoint) -> Manifest | None:
    """The manifest of a checkpoint that lmpress wrote, checked against its shards; None for any other checkpoint."""
    if not (checkpoint.folder / manifest.NAME).exists():
        return None
    told = manifest.read(checkpoint.folder)
    manifest.check(told, checkpoint)
    return told


def schemes_of(checkpoint: Checkpoint) -> dict[str, Scheme]:
    """Module -> scheme of the compressed linear layers: in every format, those that store a scale."""
    scales = (name for name in checkpoint.tensors if name.endswith(".weight_scale"))
    return parse(checkpoint.config, [name.removesuffix(".weight_scale") for name in scales])
