"""The report's `layers`: what the manifest, the run's log and the runtime know of each compressed linear layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compress.eval.report import LAYER
from compress.eval.size import Size, bits_per_weight
from compress.eval.subject import Subject

Misses = dict[str, tuple[int, int]]


def layer_rows(subject: Subject, size: Size, misses_before: Misses | None) -> list[dict[str, Any]]:
    """One row per compressed layer, in order. A checkpoint without a manifest gives what its config says.

    misses_before: the model's outlier counters before it read the texts; None where it read none.
    """
    written = {} if subject.manifest is None else {row["name"]: row for row in subject.manifest.layers}
    seconds = logged_seconds(subject.checkpoint.folder)
    misses = {} if misses_before is None else subject.model.outlier_misses()
    rows = []
    for module in size.compressed:
        scheme = subject.schemes[module.name]
        row: dict[str, Any] = {"name": module.name, "scheme": scheme.name, "format": scheme.format}
        row |= {key: value for key, value in written.get(module.name, {}).items() if key in LAYER}
        row |= {
            "kernel": subject.model.kernels.get(module.name),
            "bits_per_weight": bits_per_weight((module,)),
            "seconds": seconds.get(module.name),
        }
        if module.name in misses:
            before = (misses_before or {}).get(module.name, (0, 0))
            over, seen = (now - then for now, then in zip(misses[module.name], before, strict=True))
            row["outlier_misses"] = {"over": over, "seen": seen}
        rows.append(row)
    return rows


def kernels_by_format(subject: Subject) -> dict[str, str]:
    """Format -> names of the kernels that ran its layers."""
    found: dict[str, set[str]] = {}
    for module, kernel in subject.model.kernels.items():
        found.setdefault(subject.schemes[module].format, set()).add(kernel)
    return {name: ", ".join(sorted(kernels)) for name, kernels in found.items()}


def logged_seconds(folder: Path) -> dict[str, float]:
    """Layer -> seconds it took to compress, from the log that the run kept beside its output; empty without one.

    The log is only appended to, so a layer that a resumed run did again counts with its last line, and a line that a
    killed run left half-written is no JSON and tells nothing.
    """
    file = folder.parent / f"{folder.name}.log.jsonl"
    seconds: dict[str, float] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        for layer in event.get("layers") or () if isinstance(event, dict) else ():
            if isinstance(layer, dict) and {"name", "seconds"} <= layer.keys():
                seconds[layer["name"]] = layer["seconds"]
    return seconds
