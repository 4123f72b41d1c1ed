"""The tokens that a recipe calibrates on: packed from a text, or written by the model itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress import texts
from compress.checkpoint.source import Source
from compress.checkpoint.tokenizer import load_tokenizer
from compress.recipe import Recipe

SELF = "self"
# Written sequences are kept beside an unfinished output, so that a resumed run need not write them again.
KEPT = "calibration.safetensors"


@dataclass(frozen=True)
class Tokens:
    """Calibration tokens [samples, seqlen], their sha256, and where they came from, as the manifest tells it."""

    ids: Tensor
    sha256: str
    description: dict[str, Any]


def calibration_tokens(
    recipe: Recipe,
    source: Source,
    work: Path,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> Tokens:
    """The tokens that `recipe.calibration` names.

    Text that the model writes itself is written on `device` and kept in folder `work`, for a resumed run, once there is
    the unfinished output that it lies in; nothing else creates that folder. Raises InputError for a text that is
    missing, unreadable, or too short for one sequence.
    """
    wanted = recipe.calibration
    notes: list[str] = []
    if wanted.source == SELF:
        ids = _self_written(recipe, source, work, device, progress)
    else:
        path = recipe.expand(wanted.source)
        tokenizer = load_tokenizer(source.folder)
        documents = texts.read_documents(path, tokenizer if wanted.chat else None)
        packed = texts.encode_and_pack(documents, tokenizer, wanted.samples, wanted.seqlen, wanted.seed, path)
        ids, notes = packed.ids, list(packed.notes)
    sha256 = texts.fingerprint(ids)
    description = {
        "source": wanted.source,
        "samples": len(ids),
        "seqlen": ids.shape[1],
        "tokens": ids.numel(),
        "seed": wanted.seed,
        "chat": wanted.chat,
        "sha256": sha256,
        "notes": notes,
    }
    return Tokens(ids, sha256, description)


def _self_written(
    recipe: Recipe, source: Source, work: Path, device: torch.device, progress: Callable[[int, int], None] | None
) -> Tensor:
    """Sequences that the uncompressed model samples from its start token at temperature 1."""
    from compress.runtime.generate import sample_sequences, start_token
    from compress.runtime.load import load_model

    kept = work / KEPT
    if kept.exists():
        return load_file(kept)["ids"]
    wanted = recipe.calibration
    start = start_token(source.folder)
    model = load_model(source.folder, device)
    ids = sample_sequences(model, start, wanted.samples, wanted.seqlen, wanted.seed, progress=progress)
    if not work.parent.exists():  # Nothing has been begun that could be resumed.
        return ids
    work.mkdir(exist_ok=True)
    unfinished = kept.with_suffix(".unfinished")
    save_file({"ids": ids.contiguous()}, unfinished)
    unfinished.rename(kept)
    return ids
