"""The plan: one row per tensor, sizes, peak memory and disk, known before any weight is read."""

from __future__ import annotations

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
PROCESS_BYTES = 400 * MIB
ACTIVATION_BUDGET = 1 << 30
TOKENS_PER_BATCH = 2048


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

    sections: (name, {stored tensor: bytes}) in writing order: tensors outside the blocks, then the blocks.
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
        peak_memory=_peak_memory(source, skeleton, assignment, tokens),
        spill_bytes=max(0, activations - ACTIVATION_BUDGET),
        kv_bytes_per_token=kv_bytes_per_token(skeleton.config, model_dtype(source).itemsize),
        calibration_tokens=tokens,
    )


def model_dtype(source: Source) -> torch.dtype:
    """The dtype that holds most of the checkpoint's bytes."""
    totals: dict[torch.dtype, int] = {}
    for info in source.tensors.values():
        if not info.dtype.is_floating_point:
            continue
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
    """Stored tensors in writing order: what lies outside the blocks, each tensor alone, then block by block."""
    inside: dict[str, dict[str, int]] = {block: {} for block in blocks}
    outside: dict[str, dict[str, int]] = {}
    for name, parts in stored.items():
        owner = next((block for block in blocks if name.startswith(block + ".")), None)
        if owner is None:
            outside[name] = parts
        else:
            inside[owner].update(parts)
    return (*outside.items(), *inside.items())


def _peak_memory(source: Source, skeleton: Skeleton, assignment: Assignment, tokens: int) -> int:
    """Predicted peak resident bytes: the largest block in float32 with its Hessians, and the activations.

    A model's depth does not enter. Beside a block there is either a batch of tokens on its way through it, or the
    solver with the one group of layers that it works on.
    """
    width = skeleton.config.get_text_config().hidden_size
    widest = max(task.shape[0] for task in assignment.layers.values())
    activations = min(4 * tokens * width, ACTIVATION_BUDGET)
    batch = 4 * min(tokens, TOKENS_PER_BATCH) * (3 * widest + 6 * width)
    blocks = [_block_bytes(skeleton.block_linears(index), skeleton, assignment, batch) for index in _indices(skeleton)]
    outside = [info.nbytes for name, info in source.tensors.items() if not name.startswith(tuple(skeleton.blocks))]
    return PROCESS_BYTES + max(activations + max(blocks), *outside)


def _indices(skeleton: Skeleton) -> range:
    return range(len(skeleton.blocks))


def _block_bytes(linears: list[str], skeleton: Skeleton, assignment: Assignment, batch: int) -> int:
    """Bytes that a block with these layers takes at its worst moment."""
    shapes = {name: skeleton.shape(name) for name in linears}
    weights = 4 * sum(prod(shape) for shape in shapes.values())
    groups = [group for group in input_groups(linears) if any(name in assignment.layers for name in group)]
    hessians, solver = 0, 0
    for group in groups:
        size = sum(prod(shapes[name]) for name in group)
        needs = frozenset[str]().union(*(assignment.layers[name].stage.needs for name in group))
        square = 4 * shapes[group[0]][1] ** 2 if "hessian" in needs else 0
        hessians += square
        # Two matrices for the factor beside the Hessian; the group's weights as read, as solved, and as integers.
        solver = max(solver, 3 * square + 12 * size)
    return weights + hessians + max(solver, batch)


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
