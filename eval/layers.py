"""The report's `layers`: what the manifest, the run's log and the runtime know of each compressed linear layer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.eval.report import LAYER
from compress.eval.size import Size, bits_per_weight
from compress.eval.subject import Stored
from compress.runtime.load import Model

DENSE = "dense"
Misses = Mapping[str, tuple[int, int]]


def layer_rows(stored: Stored, size: Size, kernels: Mapping[str, str], misses: Misses) -> list[dict[str, Any]]:
    """One row per compressed layer, in order. A checkpoint without a manifest gives what its config says.

    kernels: of the loaded model, by layer. misses: outlier activations (missed, seen) while it read the texts, by
    layer. Both are empty where nothing ran.
    """
    written = {} if stored.manifest is None else {row["name"]: row for row in stored.manifest.layers}
    seconds = logged_seconds(stored.checkpoint.folder)
    rows = []
    for module in size.compressed:
        scheme = stored.schemes[module.name]
        row: dict[str, Any] = {"name": module.name, "scheme": scheme.name, "format": scheme.format}
        row |= {key: value for key, value in written.get(module.name, {}).items() if key in LAYER}
        row |= {
            "kernel": kernels.get(module.name),
            "bits_per_weight": bits_per_weight((module,)),
            "seconds": seconds.get(module.name),
        }
        if module.name in misses:
            over, seen = misses[module.name]
            row["outlier_misses"] = {"over": over, "seen": seen}
        rows.append(row)
    return rows


def misses_since(before: Misses, model: Model) -> dict[str, tuple[int, int]]:
    """What the outlier counters of `model` have counted since they stood at `before`."""
    return {
        name: (over - before[name][0], seen - before[name][1]) for name, (over, seen) in model.outlier_misses().items()
    }


def kernels_by_format(kernels: Mapping[str, str], stored: Stored) -> dict[str, str]:
    """Format ("dense" for layers that are not compressed) -> names of the `kernels` (by layer) that ran its layers."""
    found: dict[str, set[str]] = {}
    for module, kernel in kernels.items():
        scheme = stored.schemes.get(module)
        found.setdefault(scheme.format if scheme else DENSE, set()).add(kernel)
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
