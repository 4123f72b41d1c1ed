"""What a finished run leaves beside the weights: config, manifest, tokenizer, model card; and what identifies a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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


def fingerprint(recipe: Recipe, source: Source, device: torch.device) -> str:
    """What must be equal for an unfinished run to be gone on with: recipe, source, device, arithmetic and versions.

    How the result is evaluated does not change it.
    """
    made = recipe.model_copy(update={"evaluate": Evaluate()})
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    parts = [made.sha256(), identity(source), name, str(arithmetic(device))]
    parts += [f"{package} {version(package)}" for package in PACKAGES]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Run:
    """All that the closing files are made of. tensors: as written, with their sha256. records: one per section.
    device: where the blocks were worked on."""

    recipe: Recipe
    source: Source
    plan: Plan
    tokens: Tokens | None
    tensors: Mapping[str, TensorInfo]
    sha256: Mapping[str, str]
    records: list[dict[str, Any]]
    device: torch.device


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
    resolved = {key: value for key, value in run.recipe.resolved().items() if key not in ("model", "output")}
    bytes_after = sum(info.nbytes for info in run.tensors.values())
    weights = sum(prod(row.shape) for row in run.plan.rows if row.scheme)
    untouched_bytes = sum(row.bytes_after for row in run.plan.rows if not row.scheme)
    return Manifest(
        recipe=resolved,
        recipe_sha256=run.recipe.sha256(),
        source={
            "model_type": run.source.config["model_type"],
            "dtype": str(dominant_dtype(run.source.tensors)).removeprefix("torch."),
            "identity_sha256": identity(run.source),
            "note": run.source.config.get("lmpress_note"),
        },
        calibration=_calibration(run, layers),
        layers=layers,
        tensors=manifest.tensor_table(run.tensors, run.sha256),
        fallbacks=[{"name": row["name"], "reason": row["fallback"]} for row in layers if row["fallback"]],
        skipped=[{"name": name, "reason": reason} for name, reason in run.plan.assignment.untouched.items()]
        + [{"name": name, "reason": reason} for name, reason in run.plan.dropped.items()],
        versions={name: version(name) for name in PACKAGES},
        size={
            "bytes": bytes_after,
            "bytes_baseline": run.plan.bytes_before,
            "bits_per_weight": 8 * (bytes_after - untouched_bytes) / weights if weights else None,
        },
    )


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


def model_card(told: Manifest) -> str:
    """The README.md of the checkpoint folder: what it is, how it was made, how to load it."""
    schemes = sorted({layer["scheme"] for layer in told.layers})
    methods = sorted(
        {layer["method"] for layer in told.layers} | {t for layer in told.layers for t in layer["transforms"]}
    )
    smaller = told.size["bytes_baseline"] / max(1, told.size["bytes"])
    calibration = "no calibration data"
    if told.calibration:
        calibration = f"{told.calibration['tokens']} calibration tokens from {told.calibration['source']!r}"
    lines = [
        "---",
        "library_name: transformers",
        f"tags: [lmpress, {', '.join(schemes)}]",
        "---",
        f"# {told.source['model_type']} compressed to {', '.join(schemes)}",
        "",
        f"Written by lmpress {told.versions['lmpress']} with {', '.join(methods)} and {calibration}.",
        f"{len(told.layers)} linear layers at {told.size['bits_per_weight']:.3f} bits per weight, scales included; "
        f"{told.size['bytes']:,} bytes in all, {smaller:.2f} times smaller than the source.",
        f"Fallbacks: {len(told.fallbacks)}. Left alone: {', '.join(row['name'] for row in told.skipped) or 'nothing'}.",
        "",
    ]
    if told.source["note"]:
        lines += [f"About the source weights: {told.source['note']}", ""]
    loader = "`transformers.AutoModelForCausalLM.from_pretrained`, where compressed-tensors is installed"
    if "LLM_INT8" in schemes:
        lines += ["Outlier columns have no words in compressed-tensors: load it with lmpress.", ""]
    elif "W4A16_ASYM" in schemes:
        lines += [f"Loads with {loader}, given `CompressedTensorsConfig(dequantize=True)`.", ""]
    else:
        lines += [f"Loads with {loader}.", ""]
    return "\n".join(lines)
