"""What a finished run leaves beside the weights: config, manifest, tokenizer, model card; and what identifies a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import torch

from compress.calibrate import arithmetic
from compress.checkpoint import manifest, quantization_config
from compress.checkpoint.header import TensorInfo
from compress.checkpoint.manifest import Manifest
from compress.checkpoint.source import Source, dominant_dtype, identity
from compress.checkpoint.tokenizer import tokenizer_files
from compress.kernels import build
from compress.kernels.exported import exported_files
from compress.model_card import model_card
from compress.phases import Past
from compress.plan import Plan, wanted_kernels
from compress.recipe import Evaluate, Recipe
from compress.tokens import Tokens

PACKAGES = ("lmpress", "torch", "transformers", "safetensors")


@dataclass(frozen=True)
class Outcome:
    """A finished checkpoint folder and its manifest."""

    folder: Path
    manifest: Manifest


def read_outcome(folder: Path) -> Outcome:
    """The outcome in a folder that is already finished."""
    return Outcome(folder, manifest.read(folder))


def fingerprint(recipe: Recipe, sources: Sequence[Source], device: torch.device) -> str:
    """What must be equal for an unfinished run to be gone on with: recipe, models, device, arithmetic and versions.

    sources: the model that is compressed, and teachers that are other models. How the result is evaluated does not
    change it.
    """
    made = recipe.model_copy(update={"evaluate": Evaluate()})
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    parts = [made.sha256(), *map(identity, sources), name, str(arithmetic(device))]
    parts += [f"{package} {version(package)}" for package in PACKAGES]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Run:
    """All that the closing files are made of. tensors: as written, with their sha256. records: one per section.
    device: where the blocks were worked on. past: what came before, and the whole recipe."""

    recipe: Recipe
    source: Source
    plan: Plan
    tokens: Tokens | None
    tensors: Mapping[str, TensorInfo]
    sha256: Mapping[str, str]
    records: list[dict[str, Any]]
    device: torch.device
    past: Past


def closing_files(run: Run) -> dict[str, str | bytes | Path]:
    """File name -> content, or file to copy, of everything beside the shards."""
    told = make_manifest(run)
    assignment = run.plan.assignment
    schemes = {name: task.scheme for name, task in assignment.layers.items()}
    quantization = quantization_config.build(schemes, list(assignment.untouched), run.plan.scale_dtype)
    config = {**run.source.config, "quantization_config": quantization}
    files: dict[str, str | bytes | Path] = {file.name: file for file in tokenizer_files(run.source.folder)}
    files["config.json"] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    files[manifest.NAME] = manifest.encode(told)
    files["README.md"] = model_card(told)
    if run.recipe.export.kernels:
        wanted = wanted_kernels(assignment, run.plan.scale_dtype)
        files |= exported_files(build.build(wanted, run.recipe.export.kernels))
    return files


def outlier_bytes(run: Run) -> int:
    """Bytes of the outlier columns that calibration found, which the plan could not know."""
    layers = [layer for record in run.records for layer in record["layers"]]
    itemsize = run.plan.scale_dtype.itemsize
    rows = {name: task.shape[0] for name, task in run.plan.assignment.layers.items()}
    return sum(len(layer["outlier_columns"]) * (4 + itemsize * rows[layer["name"]]) for layer in layers)


def make_manifest(run: Run) -> Manifest:
    """The manifest of a run: no dates and no timings, so that two runs of one recipe write the same one."""
    layers = [layer for record in run.records for layer in record["layers"]]
    bytes_after = sum(info.nbytes for info in run.tensors.values())
    weights = sum(prod(row.shape) for row in run.plan.rows if row.scheme)
    untouched_bytes = sum(row.bytes_after for row in run.plan.rows if not row.scheme)
    return Manifest(
        **recipe_fields(run.past.recipe),
        source=run.past.source or source_fields(run.source),
        calibration=_calibration(run, layers),
        layers=layers,
        tensors=manifest.tensor_table(run.tensors, run.sha256),
        fallbacks=[{"name": row["name"], "reason": row["fallback"]} for row in layers if row["fallback"]],
        skipped=[{"name": name, "reason": reason} for name, reason in run.plan.assignment.untouched.items()]
        + [{"name": name, "reason": reason} for name, reason in run.plan.dropped.items()],
        versions={name: version(name) for name in PACKAGES},
        size={
            "bytes": bytes_after,
            "bytes_baseline": run.past.nbytes or run.plan.bytes_before,
            "bits_per_weight": 8 * (bytes_after - untouched_bytes) / weights if weights else None,
        },
        phases=list(run.past.told),
    )


def float_manifest(
    past: Past, source: Source, tensors: Mapping[str, TensorInfo], sha256: Mapping[str, str], row: dict[str, Any]
) -> Manifest:
    """The manifest of a checkpoint without compressed layers, behind a phase that tells `row` of itself.

    source: what that phase began with. tensors: as written, with their sha256.
    """
    nbytes = sum(info.nbytes for info in tensors.values())
    before = past.nbytes or sum(info.nbytes for info in source.stored.values())
    return Manifest(
        **recipe_fields(past.recipe),
        source=past.source or source_fields(source),
        calibration=None,
        layers=[],
        tensors=manifest.tensor_table(tensors, sha256),
        fallbacks=[],
        skipped=[],
        versions={name: version(name) for name in PACKAGES},
        size={"bytes": nbytes, "bytes_baseline": before, "bits_per_weight": None},
        phases=[*past.told, row],
    )


def recipe_fields(recipe: Recipe) -> dict[str, Any]:
    """What a manifest says of the recipe."""
    resolved = {key: value for key, value in recipe.resolved().items() if key not in ("model", "output")}
    return {"recipe": resolved, "recipe_sha256": recipe.sha256()}


def source_fields(source: Source) -> dict[str, Any]:
    """What a manifest says of the model that a recipe starts from."""
    return {
        "model_type": source.config["model_type"],
        "dtype": str(dominant_dtype(source.tensors)).removeprefix("torch."),
        "identity_sha256": identity(source),
        "note": source.config.get("lmpress_note"),
    }


def _calibration(run: Run, layers: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Where the tokens came from, with a note for each thing about them that deserves a second look."""
    if run.tokens is None:
        return None
    tasks = run.plan.assignment.layers
    few = [row for row in layers if row["damping"] is not None and row["tokens"] < tasks[row["name"]].shape[1]]
    dead = [row for row in layers if row["dead_channels"]]
    asked = {name: getattr(task.stage.settings, "damping", None) for name, task in tasks.items()}
    raised = [row for row in layers if row["damping"] is not None and row["damping"] > asked[row["name"]]]
    notes = list(run.tokens.description["notes"])
    if few:
        notes.append(
            f"{few[0]['tokens']} tokens are fewer than the input channels of {len(few)} layers "
            f"({few[0]['name']}, ...): their Hessians lack full rank; give more samples"
        )
    if dead:
        count = sum(row["dead_channels"] for row in dead)
        notes.append(f"{count} input channels in {len(dead)} layers were zero in every token ({dead[0]['name']}, ...)")
    if raised:
        most = max(row["damping"] for row in raised)
        notes.append(f"damping was raised in {len(raised)} layers, up to {most:g} ({raised[0]['name']}, ...)")
    multiplied = str(arithmetic(run.device)).removeprefix("torch.")
    return {**run.tokens.description, "arithmetic": multiplied, "notes": notes}
