"""Compress one decoder block: fold the transforms, solve for the integers, and say what each layer lost."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from compress import methods
from compress.assignment import Group, LayerTask, Needs
from compress.errors import InputError
from compress.formats import format_named
from compress.formats.grid import Quantized, dequantize
from compress.formats.pattern import Pattern
from compress.model import Pair, input_groups
from compress.prune import Pruned, sparsegpt
from compress.quantize import Solved
from compress.quantize.scales import Search, preview
from compress.stage import Stage
from compress.stats import InputStats
from compress.transform import Rounding, head_sources


@dataclass(frozen=True)
class LayerReport:
    """What happened to one layer.

    error_db: signal over error of its output on the calibration tokens ("output"), or of its weights ("weight") where
    no Hessian was collected. seconds: its share of the time its group took.
    """

    name: str
    method: str
    scheme: str
    group_size: int | None
    format: str
    error_db: float
    error_of: str
    damping: float | None
    tokens: int
    dead_channels: int
    outlier_columns: tuple[int, ...]
    transforms: tuple[str, ...]
    fallback: str | None
    seconds: float = field(compare=False)

    def durable(self) -> dict[str, Any]:
        """The report as plain values without its timing: the same in every run."""
        values = asdict(self)
        del values["seconds"]
        return values


class Block:
    """The float32 weights of one block on their way to the grid.

    weights: tensor name -> float32 tensor; `quantize` takes out what it has put on the grid. stats: statistics of the
    input of each group of layers. dtypes: what each tensor is stored in if it stays off the grid.
    """

    def __init__(
        self, weights: dict[str, Tensor], stats: dict[Group, InputStats], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        self.weights = weights
        self.stats = stats
        self.dtypes = dtypes
        self.touched: dict[str, tuple[str, ...]] = {}
        self.thresholds = {group: found.threshold for group, found in stats.items() if found.outlier_share is not None}

    def transform(self, stage: Stage, pair: Pair, rounding: Rounding, kept: bool) -> None:
        """Apply a transform stage to one pair, whose consumers will then be rounded as `rounding` says.

        kept: the producer stays off the grid. Statistics of the consumers' input are rescaled, not collected again.
        """
        group = next(group for group in self.stats if pair.consumers[0] in group)
        consumers = [self.weights[f"{name}.weight"] for name in pair.consumers]
        sources = None
        if pair.repeat > 1:
            sources = head_sources(consumers[0].shape[1], pair.repeat, pair.head_size).to(consumers[0].device)
        method = methods.find("transform", stage.method)
        if hasattr(method, "order"):
            size = pair.head_size if pair.repeat * pair.head_size > 1 else consumers[0].shape[1]
            order = method.order(consumers, self.stats[group], stage.settings, (pair.repeat, size))
            self.stats[group] = self.stats[group].permuted(self.permute(pair, order))
            self._touch(pair, stage)
            return
        scale = method.scale(consumers, self.stats[group], rounding, stage.settings, sources)
        self.stats[group] = self.stats[group].scaled(self.fold(pair, scale, kept))
        self._touch(pair, stage)

    def _touch(self, pair: Pair, stage: Stage) -> None:
        for name in pair.consumers:
            self.touched[name] = (*self.touched.get(name, ()), stage.method)

    def permute(self, pair: Pair, order: Tensor) -> Tensor:
        """Put the channels of a linear pair into `order` int64 [units, size], within each unit; the function stays.

        Returns the order of the consumers' columns, int64 [K]: each unit feeds `repeat` heads, which all follow.
        """
        units, size = order.shape
        start = torch.arange(units, device=order.device)[:, None] * size
        rows = (start + order).flatten()
        columns = _follow(order, pair.repeat)
        for producer in (pair.producer, *pair.gates):
            for name in (f"{producer}.weight", f"{producer}.bias"):
                if name in self.weights:
                    self.weights[name] = self.weights[name][rows]
        for consumer in pair.consumers:
            self.weights[f"{consumer}.weight"] = self.weights[f"{consumer}.weight"][:, columns]
        return columns

    @property
    def stale(self) -> Needs:
        """What transforms have made void and must be collected again: shares of outliers have no closed form."""
        groups = [group for group in self.thresholds if self.stats[group].outlier_share is None]
        return {group: (frozenset({"outliers"}), self.thresholds[group]) for group in groups}

    def renew(self, stats: Mapping[Group, InputStats]) -> None:
        """Put in what was collected again."""
        for group, found in stats.items():
            self.stats[group] = replace(self.stats[group], outlier_share=found.outlier_share)

    def fold(self, pair: Pair, scale: Tensor, kept: bool = False) -> Tensor:
        """Divide the producer's output by `scale` [K], multiply the consumers' columns, and return what was applied.

        Heads that feed several query heads can only move by one scale: the geometric mean of theirs. The function is
        kept exactly although producers off the grid are stored in 16 bit: a norm is rounded first, and the consumers
        follow the rounded value; a linear producer that is `kept` off the grid moves by powers of two.
        """
        name = f"{pair.producer}.weight"
        if pair.kind == "norm":
            gain = self.weights[name] + pair.offset
            divided = (gain / scale - pair.offset).to(self.dtypes[name]).float()
            applied = gain / (divided + pair.offset)
            # A channel whose gain is zero, or underflows, carries nothing to scale.
            movable = torch.isfinite(applied) & (applied > 0)
            self.weights[name] = torch.where(movable, divided, self.weights[name])
            applied = torch.where(movable, applied, torch.ones_like(applied))
        else:
            heads = scale.view(-1, pair.repeat, pair.head_size)
            shared = heads.log2().mean(1, keepdim=True)
            shared = (shared.round() if kept else shared).exp2()
            applied = shared.expand(heads.shape).reshape(-1)
            self.weights[name] = self.weights[name] / shared.reshape(-1, 1)
            bias = f"{pair.producer}.bias"
            if bias in self.weights:
                self.weights[bias] = self.weights[bias] / shared.reshape(-1)
        for consumer in pair.consumers:
            self.weights[f"{consumer}.weight"] = self.weights[f"{consumer}.weight"] * applied
        return applied

    def quantize(self, tasks: list[LayerTask], scale_dtype: torch.dtype) -> tuple[dict[str, Tensor], list[LayerReport]]:
        """Put layers that share their input, method and scheme on the grid, as one matrix of stacked rows.

        Their float weights are dropped. Returns the stored tensors by full name and a report per layer.
        """
        began = time.monotonic()
        scheme = tasks[0].scheme
        stats = next((stats for group, stats in self.stats.items() if tasks[0].name in group), None)
        weight = torch.cat([self.weights.pop(f"{task.name}.weight") for task in tasks])
        if not all_finite(weight):
            raise InputError(f"{', '.join(task.name for task in tasks)}: weights overflow float32: check the source's")
        solved = solve(tasks[0], weight, stats, scale_dtype)
        stored: dict[str, Tensor] = {}
        reports: list[LayerReport] = []
        start = 0
        for task in tasks:
            rows = slice(start, start + task.shape[0])
            start = rows.stop
            part = _rows(solved.quantized, rows)
            packed = format_named(scheme.format).pack(part, scheme.grid)
            stored |= {f"{task.name}.{suffix}": tensor.cpu() for suffix, tensor in packed.items()}
            error_db, error_of = output_error(weight[rows], dequantize(part), stats)
            columns = [] if part.outlier_columns is None else part.outlier_columns.tolist()
            reports.append(
                LayerReport(
                    name=task.name,
                    method=task.method,
                    scheme=scheme.name,
                    group_size=scheme.grid.group_size,
                    format=scheme.format,
                    error_db=error_db,
                    error_of=error_of,
                    damping=solved.damping,
                    tokens=stats.tokens if stats else 0,
                    dead_channels=stats.dead_channels if stats else 0,
                    outlier_columns=tuple(columns),
                    transforms=self.touched.get(task.name, ()),
                    fallback=solved.fallback,
                    seconds=0.0,
                )
            )
        seconds = (time.monotonic() - began) / len(tasks)
        return stored, [replace(report, seconds=seconds) for report in reports]

    def remaining(self) -> dict[str, Tensor]:
        """Tensors that stayed off the grid, in the dtypes they are stored in."""
        return {name: weight.to(self.dtypes[name]).cpu() for name, weight in self.weights.items()}


def _follow(order: Tensor, repeat: int) -> Tensor:
    """The columns, int64 [K], of heads that read the units of `order` [units, size], `repeat` of them each."""
    units, size = order.shape
    heads = torch.arange(units * repeat, device=order.device).view(units, repeat, 1) * size
    return (heads + order[:, None]).flatten()


def solve(task: LayerTask, weight: Tensor, stats: InputStats | None, scale_dtype: torch.dtype) -> Solved:
    """What the stages of `task` make of `weight` float32 [N, K]: pruned, put on the grid, or both."""
    stage, prune = task.stage, task.prune
    if prune is None or prune.pattern is None:
        return _quantize(task, weight, stats, scale_dtype)
    if isinstance(prune.settings, sparsegpt.Config) and prune.settings.joint and stage.method == "gptq":
        return _quantize(task, weight, stats, scale_dtype, prune.pattern)
    method = methods.find("prune", prune.method)
    pruned: Pruned = method.prune(weight, stats, prune.pattern, prune.settings, scale_dtype)
    if stage is prune:
        ones = torch.ones(len(weight), 1, device=weight.device)
        kept = Quantized(pruned.weight.to(scale_dtype), ones, mask=pruned.mask)
        return Solved(kept, pruned.damping, pruned.fallback)
    # Only GPTQ moves other weights than those it rounds; elsewhere what is zero stays so, on a symmetric grid.
    held = (pruned.mask,) if stage.method == "gptq" else ()
    solved = _quantize(task, pruned.weight, stats, scale_dtype, *held)
    reasons = [reason for reason in (pruned.fallback, solved.fallback) if reason]
    return replace(solved, quantized=replace(solved.quantized, mask=pruned.mask), fallback="; ".join(reasons) or None)


def _quantize(
    task: LayerTask, weight: Tensor, stats: InputStats | None, scale_dtype: torch.dtype, *sparsity: Pattern | Tensor
) -> Solved:
    """What the quantize stage of `task` makes of `weight`; a `sparsity` is for gptq, which alone takes one."""
    method = methods.find("quantize", task.stage.method)
    solved: Solved = method.quantize(weight, stats, task.scheme.grid, task.stage.settings, scale_dtype, *sparsity)
    return solved


def rounding_of(task: LayerTask, scale_dtype: torch.dtype) -> Rounding:
    """What the quantize stage of `task` will do to a weight, as far as a transform in front of it needs to know."""
    settings, grid = task.stage.settings, task.scheme.grid
    search: Search = getattr(settings, "search", "minmax")

    def nearest(weight: Tensor, cost: Tensor | None) -> Tensor:
        return preview(weight, cost, grid, search, scale_dtype)

    return Rounding(nearest, damping=getattr(settings, "damping", None))


def quantize_groups(linears: list[str], layers: Mapping[str, LayerTask]) -> list[list[LayerTask]]:
    """The layers of a block in the batches that `Block.quantize` takes: one input, one method, one scheme each."""
    batches: list[list[LayerTask]] = []
    for group in input_groups(linears):
        alike: dict[tuple[int, int, str], list[LayerTask]] = {}
        for name in group:
            if name in layers:
                task = layers[name]
                alike.setdefault((id(task.stage), id(task.prune), task.scheme.name), []).append(task)
        batches.extend(alike.values())
    return batches


def all_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite, told by the extremes: torch.isfinite takes twice the memory of `values`."""
    values = values.float() if values.dtype.itemsize == 1 else values  # 8-bit floats have no order of their own
    return values.numel() == 0 or bool(torch.isfinite(torch.stack(values.aminmax())).all())


def output_error(weight: Tensor, decided: Tensor, stats: InputStats | None) -> tuple[float, str]:
    """Signal over error in dB of two weights [N, K]: of their outputs where the Hessian is known, else their own."""
    error = weight - decided
    if stats is not None and stats.hessian is not None:
        signal = float((weight @ stats.hessian).mul_(weight).sum())
        noise = float((error @ stats.hessian).mul_(error).sum())
        return _decibels(signal, noise), "output"
    return _decibels(float(weight.square().sum()), float(error.square().sum())), "weight"


def _decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise), held within 0 signal and no noise by 200 dB, which float32 cannot reach."""
    if noise <= 0:
        return 200.0
    return max(-200.0, 10 * math.log10(signal / noise)) if signal > 0 else -200.0


def _rows(quantized: Quantized, rows: slice) -> Quantized:
    """The same rows of every part of a weight."""
    return Quantized(
        q=quantized.q[rows],
        scale=quantized.scale[rows],
        zero=None if quantized.zero is None else quantized.zero[rows],
        # A copy, since each layer stores its own.
        outlier_columns=None if quantized.outlier_columns is None else quantized.outlier_columns.clone(),
        outlier_weight=None if quantized.outlier_weight is None else quantized.outlier_weight[rows],
        mask=None if quantized.mask is None else quantized.mask[rows],
    )
