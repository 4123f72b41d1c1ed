"""The walk: each block is read, measured, transformed, quantized, written and propagated before the next is touched.

Peak memory follows the largest block, not the model. What is propagated is decoded from what was written, so that a
resumed run, which reads finished blocks back, computes the same hidden states as an uninterrupted one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.activations import ActivationBuffer
from compress.assignment import Assignment, Group, LayerTask, Needs, block_needs
from compress.block import Block, LayerReport, all_finite, quantize_groups, rounding_of
from compress.calibrate import Calibration, arithmetic, collect, embed_from, propagate
from compress.checkpoint.source import Source
from compress.checkpoint.writer import Writer
from compress.errors import InputError
from compress.formats import format_named
from compress.formats.grid import dequantize
from compress.kernels.reference import round_activations
from compress.model import Skeleton, materialized
from compress.plan import ACTIVATION_BUDGET, TOKENS_PER_BATCH, Plan
from compress.resident import release_memory
from compress.run_log import Observer
from compress.stats import InputStats
from compress.tokens import Tokens


class Walk:
    """A plan being carried out: `run` walks all sections that the writer does not hold yet."""

    def __init__(
        self, source: Source, skeleton: Skeleton, plan: Plan, writer: Writer, device: torch.device, observer: Observer
    ) -> None:
        self.source = source
        self.skeleton = skeleton
        self.plan = plan
        self.writer = writer
        self.device = device
        self.observer = observer
        self.done = frozenset(writer.done)
        self.planned = dict(plan.sections)

    @property
    def assignment(self) -> Assignment:
        return self.plan.assignment

    def run(self, tokens: Tokens | None) -> list[dict[str, Any]]:
        """Walk every section, calibrating on `tokens` where a method needs them.

        Returns the journaled record of each section, in order. Raises InputError where `tokens` are not those that an
        unfinished run began with.
        """
        self._check_tokens(tokens)
        for name, _ in self._outside():
            if name not in self.done:
                self._write(name, *self._keep(name), tokens_sha256=tokens.sha256 if tokens else None)
                release_memory(self.device)
        unfinished = len(self.done) < len(self.planned)
        calibration = self._embed(tokens.ids) if tokens and unfinished else None
        for index in range(len(self.skeleton.blocks)):
            self._step(index, calibration)
        if calibration is not None:
            calibration.hidden.close()
        return [self.writer.record(name) for name, _ in self.plan.sections]

    def _step(self, index: int, calibration: Calibration | None) -> None:
        """One block, start to end. A block that was finished earlier is only propagated."""
        began = time.monotonic()
        name = self.skeleton.blocks[index]
        reports: list[LayerReport] = []
        stored: dict[str, Tensor] = {}
        if name not in self.done:
            stored, reports = self._compress_block(index, calibration)
            self._write(name, stored, reports)
        elif calibration is not None:
            stored = self.writer.read(name)
        if calibration is not None and index + 1 < len(self.skeleton.blocks):
            self._propagate(index, stored, calibration)
        del stored
        release_memory(self.device)
        layers = [asdict(report) for report in reports]
        self.observer.event("block", index=index, name=name, layers=layers, seconds=time.monotonic() - began)

    def _embed(self, ids: Tensor) -> Calibration:
        """Hidden states in front of the first block."""
        buffer, batch = ActivationBuffer(ACTIVATION_BUDGET, self.writer.work), max(1, TOKENS_PER_BATCH // ids.shape[1])
        return embed_from(self.source, self.skeleton, ids, batch, buffer, arithmetic(self.device))

    def _compress_block(
        self, index: int, calibration: Calibration | None
    ) -> tuple[dict[str, Tensor], list[LayerReport]]:
        """The stored tensors of a block and a report per quantized layer."""
        name, linears = self.skeleton.blocks[index], self.skeleton.block_linears(index)
        prefix = name + "."
        names = [name for name in self.source.tensors if name.startswith(prefix) and name not in self.plan.dropped]
        weights = {tensor: self._read(tensor).to(self.device, torch.float32) for tensor in names}
        stats = self._collect(index, weights, block_needs(linears, self.assignment, index), calibration)
        block = Block(weights, stats, self._dtypes(names))
        for task in self.assignment.transforms:
            for pair in task.pairs[index]:
                behind = self.assignment.layers[pair.consumers[0]]
                kept = pair.producer not in self.assignment.layers
                block.transform(task.stage, pair, rounding_of(behind, self.plan.scale_dtype), kept)
        block.renew(self._collect(index, weights, block.stale, calibration))
        return self._solve(block, linears)

    def _collect(
        self, index: int, weights: dict[str, Tensor], needs: Needs, calibration: Calibration | None
    ) -> dict[Group, InputStats]:
        """Statistics of the inputs of a block with these `weights`; none without calibration."""
        if calibration is None or not needs:
            return {}
        prefix = self.skeleton.blocks[index] + "."
        relative = {tensor.removeprefix(prefix): weight for tensor, weight in weights.items()}
        with materialized(self.skeleton.block(index), relative):
            stats = collect(self.skeleton, index, calibration, needs)
        release_memory(self.device)
        return stats

    def _keep(self, name: str) -> tuple[dict[str, Tensor], list[LayerReport]]:
        """A tensor outside the blocks: copied as it is, but for an output layer that a stage names."""
        layer = name.removesuffix(".weight")
        if layer not in self.assignment.layers:
            return {name: self._read(name)}, []
        return self._solve(Block({name: self._read(name).to(self.device, torch.float32)}, {}, {}), [layer])

    def _read(self, name: str) -> Tensor:
        """A tensor of the source. Raises InputError where it is not finite: nothing behind it would mean anything."""
        tensor = self.source.read(name)
        if tensor.is_floating_point() and not all_finite(tensor):
            raise InputError(f"{self.source.tensors[name].file}: tensor {name!r} holds NaN or infinity: get it anew")
        return tensor

    def _outside(self) -> list[tuple[str, dict[str, int]]]:
        """The sections that hold what lies outside the blocks."""
        return [section for section in self.plan.sections if section[0] not in self.skeleton.blocks]

    def _check_tokens(self, tokens: Tokens | None) -> None:
        """Refuse to go on with other calibration tokens than an unfinished run began with."""
        sha256 = tokens.sha256 if tokens else None
        for name, _ in self._outside():
            if name in self.done and self.writer.record(name)["tokens_sha256"] != sha256:
                raise InputError(
                    f"{self.writer.partial}: was begun with other calibration tokens: restore that text, or give "
                    "--restart to begin again"
                )

    def _solve(self, block: Block, linears: list[str]) -> tuple[dict[str, Tensor], list[LayerReport]]:
        stored: dict[str, Tensor] = {}
        reports: list[LayerReport] = []
        for tasks in quantize_groups(linears, self.assignment.layers):
            packed, told = block.quantize(tasks, self.plan.scale_dtype)
            stored |= packed
            reports += told
            release_memory(self.device)
        return stored | block.remaining(), reports

    def _dtypes(self, names: Iterable[str]) -> dict[str, torch.dtype]:
        return {name: self.source.tensors[name].dtype for name in names}

    def _write(self, name: str, stored: dict[str, Tensor], reports: list[LayerReport], **fields: Any) -> None:
        ordered = {tensor: stored[tensor] for tensor in self.planned[name]}
        self.writer.write(name, ordered, {"layers": [report.durable() for report in reports], **fields})

    def _propagate(self, index: int, stored: dict[str, Tensor], calibration: Calibration) -> None:
        """Replace the hidden states by those behind the block as it was stored."""
        prefix = self.skeleton.blocks[index] + "."
        tasks = [self.assignment.layers[n] for n in self.skeleton.block_linears(index) if n in self.assignment.layers]
        weights, rules = decode(stored, tasks)
        relative = {name.removeprefix(prefix): weight.to(self.device) for name, weight in weights.items()}
        with materialized(self.skeleton.block(index), relative):
            propagate(self.skeleton, index, calibration, rules)


Rounding = Callable[[Tensor], Tensor]


def decode(stored: dict[str, Tensor], tasks: Iterable[LayerTask]) -> tuple[dict[str, Tensor], dict[str, Rounding]]:
    """Float32 weights by parameter name, and the rounding of inputs by layer name, that stored tensors stand for."""
    left = dict(stored)
    weights: dict[str, Tensor] = {}
    rules: dict[str, Rounding] = {}
    for task in tasks:
        prefix = task.name + "."
        # A module's own tensors; its bias, if any, is not part of the format.
        suffixes = [name.removeprefix(prefix) for name in stored if name.startswith(prefix) and name != f"{prefix}bias"]
        parts = {suffix: left.pop(prefix + suffix) for suffix in suffixes}
        quantized = format_named(task.scheme.format).unpack(parts, task.scheme.grid)
        weights[f"{task.name}.weight"] = dequantize(quantized)
        if task.scheme.activation_bits is not None:
            columns = quantized.outlier_columns
            rules[task.name] = partial(round_activations, scheme=task.scheme, outlier_columns=columns)
    return weights | {name: tensor.float() for name, tensor in left.items()}, rules
