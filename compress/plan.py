"""The plan: one row per tensor, sizes, peak memory and disk, known before any weight is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from compress.assignment import Assignment, LayerTask, scale_dtype
from compress.checkpoint.source import Source
from compress.formats import format_named, int8_outlier
from compress.formats.grid import TensorSpec
from compress.model import Skeleton, input_groups, kv_bytes_per_token
from compress.recipe import Recipe

MIB = 1 << 20
# Resident memory of Python, torch and transformers before any weight is read, measured on CPU builds.
PROCESS_BYTES = 420 * MIB
ACTIVATION_BUDGET = 1 << 30
TOKENS_PER_BATCH = 2048
# The section that holds what lies outside the blocks: embedding, final norm, output layer.
REST = "rest"


@dataclass(frozen=True)
class Row:
    """One tensor of the source and what becomes of it. bits: stored bits per source weight, scales included."""

    name: str
    shape: tuple[int, ...]
    method: str
    scheme: str
    format: str
    kernel: str
    bits: float
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Plan:
    """What a recipe will do to a model.

    sections: (name, {stored tensor: bytes}) in writing order: what precedes the blocks, each block, what follows.
    exact: False where outlier columns, found at calibration, decide the size; bytes are an estimate then.
    """

    assignment: Assignment
    rows: tuple[Row, ...]
    sections: tuple[tuple[str, dict[str, int]], ...]
    dropped: tuple[str, ...]
    scale_dtype: torch.dtype
    exact: bool
    peak_memory: int
    spill_bytes: int
    kv_bytes_per_token: int
    calibration_tokens: int

    @property
    def bytes_before(self) -> int:
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        return sum(row.bytes_after for row in self.rows)

    @property
    def disk_bytes(self) -> int:
        """Free disk that a run takes: the output, and activations that do not fit their memory budget."""
        return self.bytes_after + self.spill_bytes

    def bits_per_weight(self, compressed_only: bool = True) -> float:
        """Stored bits per weight, over the compressed linear layers alone or over all tensors."""
        rows = [row for row in self.rows if row.scheme or not compressed_only]
        weights = sum(prod(row.shape) for row in rows)
        return 8 * sum(row.bytes_after for row in rows) / weights if weights else 0.0


def make_plan(recipe: Recipe, source: Source, skeleton: Skeleton, assignment: Assignment) -> Plan:
    """Plan `recipe` on `source`; reads no weight."""
    stored_dtype = scale_dtype(recipe, model_dtype(source))
    dropped = _duplicates(source)
    rows: list[Row] = []
    stored: dict[str, dict[str, int]] = {}
    for name, info in source.tensors.items():
        if name in dropped:
            continue
        task = assignment.layers.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        after = info.nbytes
        stored[name] = {name: info.nbytes}
        if task is not None:
            after = sum(spec.nbytes for spec in _specs(task, stored_dtype).values())
            stored[name] = _most_bytes(task, stored_dtype)
        rows.append(_row(name, info.shape, info.nbytes, task, after))
    tokens = recipe.calibration.samples * recipe.calibration.seqlen if assignment.needs_calibration else 0
    activations = tokens * skeleton.config.get_text_config().hidden_size * 4
    return Plan(
        assignment=assignment,
        rows=tuple(rows),
        sections=_sections(skeleton.blocks, stored),
        dropped=dropped,
        scale_dtype=stored_dtype,
        exact=all(task.scheme.threshold is None for task in assignment.layers.values()),
        peak_memory=_peak_memory(source, skeleton, assignment, activations),
        spill_bytes=max(0, activations - ACTIVATION_BUDGET),
        kv_bytes_per_token=kv_bytes_per_token(skeleton.config, model_dtype(source).itemsize),
        calibration_tokens=tokens,
    )


def model_dtype(source: Source) -> torch.dtype:
    """The dtype that holds most of the checkpoint's bytes."""
    totals: dict[torch.dtype, int] = {}
    for info in source.tensors.values():
        totals[info.dtype] = totals.get(info.dtype, 0) + info.nbytes
    return max(totals, key=lambda dtype: totals[dtype])


def _duplicates(source: Source) -> tuple[str, ...]:
    """Output weights that a tied checkpoint stores a second time; loaders ignore them, so they are not written."""
    tied = source.config.get("tie_word_embeddings", False)
    return ("lm_head.weight",) if tied and "lm_head.weight" in source.tensors else ()


def _specs(task: LayerTask, stored_dtype: torch.dtype) -> dict[str, TensorSpec]:
    return format_named(task.scheme.format).specs(task.shape, task.scheme.grid, stored_dtype)


def _most_bytes(task: LayerTask, stored_dtype: torch.dtype) -> dict[str, int]:
    """The most bytes that each stored tensor can take: any number of columns may turn out to be outliers."""
    specs = _specs(task, stored_dtype)
    if task.scheme.threshold is not None:
        specs = int8_outlier.specs(task.shape, task.scheme.grid, stored_dtype, outliers=task.shape[1])
    return {f"{task.name}.{suffix}": spec.nbytes for suffix, spec in specs.items()}


def _row(name: str, shape: tuple[int, ...], before: int, task: LayerTask | None, after: int) -> Row:
    weights = max(1, prod(shape))
    if task is None:
        return Row(name, shape, "copy", "", "dense", "", 8 * after / weights, before, after)
    method, scheme = task.stage.method, task.scheme
    group = f" g{scheme.grid.group_size}" if scheme.grid.group_size else ""
    return Row(name, shape, method, scheme.name + group, scheme.format, "reference", 8 * after / weights, before, after)


def _sections(blocks: list[str], stored: dict[str, dict[str, int]]) -> tuple[tuple[str, dict[str, int]], ...]:
    """Stored tensors in writing order: everything outside the blocks first, then block by block."""
    prefixes = {block + ".": block for block in blocks}
    sections: dict[str, dict[str, int]] = {name: {} for name in (REST, *blocks)}
    for name, parts in stored.items():
        owner = next((block for prefix, block in prefixes.items() if name.startswith(prefix)), REST)
        sections[owner].update(parts)
    return tuple(sections.items())


def _peak_memory(source: Source, skeleton: Skeleton, assignment: Assignment, activations: int) -> int:
    """Predicted peak resident bytes: the largest block in float32, its Hessians, the solver, and the activations.

    A model's depth does not enter. The embedding is held while tokens are embedded, before any block is.
    """
    if not assignment.layers:
        return PROCESS_BYTES
    blocks = [
        _block_bytes(skeleton.block_linears(index), skeleton, assignment) for index in range(len(skeleton.blocks))
    ]
    width = skeleton.config.get_text_config().hidden_size
    widest = max((task.shape[0] for task in assignment.layers.values()), default=0)
    batch = TOKENS_PER_BATCH * 4 * (3 * widest + 6 * width) if activations else 0
    outside = [info.nbytes for name, info in source.tensors.items() if _outside(name, skeleton.blocks)]
    return PROCESS_BYTES + max([max(blocks) + batch, *outside]) + min(activations, ACTIVATION_BUDGET)


def _outside(name: str, blocks: Iterable[str]) -> bool:
    return not any(name.startswith(block + ".") for block in blocks)


def _block_bytes(linears: list[str], skeleton: Skeleton, assignment: Assignment) -> int:
    shapes = {name: skeleton.shape(name) for name in linears}
    weights = 4 * sum(prod(shape) for shape in shapes.values())
    groups = [group for group in input_groups(linears) if any(name in assignment.layers for name in group)]
    if not groups or not assignment.needs_calibration:
        return weights + max((8 * prod(shape) for shape in shapes.values()), default=0)
    hessians = sum(4 * shapes[group[0]][1] ** 2 for group in groups)
    solver = max(4 * (3 * shapes[g[0]][1] ** 2 + 3 * sum(prod(shapes[n]) for n in g)) for g in groups)
    return weights + hessians + solver


def summary(plan: Plan, context: int, batch: int) -> dict[str, Any]:
    """Totals of a plan as plain values, with the key-value cache of `batch` sequences of `context` tokens."""
    return {
        "bytes_before": plan.bytes_before,
        "bytes_after": plan.bytes_after,
        "size_is_estimate": not plan.exact,
        "bits_per_weight": plan.bits_per_weight(),
        "bits_per_weight_all": plan.bits_per_weight(compressed_only=False),
        "peak_memory_bytes": plan.peak_memory,
        "disk_bytes": plan.disk_bytes,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_cache": {"context": context, "batch": batch, "bytes": plan.kv_bytes_per_token * context * batch},
        "calibration_tokens": plan.calibration_tokens,
        "layers": len(plan.assignment.layers),
        "untouched": plan.assignment.untouched,
        "dropped": list(plan.dropped),
        "notes": list(plan.assignment.notes),
    }
