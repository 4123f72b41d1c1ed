"""The shrink phase: a smaller float student is cut out of the model in one folder, and written to another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from compress.checkpoint import TensorInfo, manifest, open_checkpoint
from compress.checkpoint.output import WORK, partial_folder
from compress.model_card import model_card
from compress.outcome import Outcome, float_manifest, read_outcome
from compress.phases import Past
from compress.recipe import Recipe
from compress.run_log import Observer
from compress.tokens import calibration_tokens
from compress.training.cut import CutOptions, cut, needs


def shrink(part: Recipe, past: Past, device: torch.device, restart: bool, observer: Observer) -> Outcome:
    """Cut what the stages of `part` say out of the model in `part.model`, and write the student to `part.output`.

    Raises InputError for what they cannot do to that model, and for a disk that is full.
    """
    source, output = open_checkpoint(Path(str(part.model))), Path(str(part.output))
    ids = None
    if needs(part.stages):
        work = partial_folder(output) / WORK
        tokens = calibration_tokens(
            part, source, work, device, lambda done, total: observer.event("sampling", done=done, total=total)
        )
        output.parent.mkdir(parents=True, exist_ok=True)
        observer.event("tokens", **tokens.description)
        ids = tokens.ids

    def closing(
        told: dict[str, Any], tensors: Mapping[str, TensorInfo], sha256: Mapping[str, str]
    ) -> dict[str, str | bytes | Path]:
        found = float_manifest(past, source, tensors, sha256, {"kind": "shrink", **told})
        return {manifest.NAME: manifest.encode(found), "README.md": model_card(found)}

    options = CutOptions(device, restart, past.mark, closing)
    cut(source.folder, part.stages, output, ids, options, observer)
    return read_outcome(output)
