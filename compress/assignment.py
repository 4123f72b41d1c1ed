"""Which method and scheme each linear layer gets, decided and checked before any weight is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from compress import methods
from compress.errors import USAGE, InputError
from compress.formats import format_named, sparse24
from compress.formats.grid import FLOAT_BITS
from compress.formats.scheme import FLOATS, Scheme, pruned
from compress.matching import select
from compress.model import Pair, Skeleton, input_groups, pairs
from compress.recipe import Recipe
from compress.stage import Stage

EVERY_BLOCK_LINEAR = ("*",)
NOTHING: Mapping[str, float] = MappingProxyType({})
ROUTERS = frozenset({"gate", "router"})
SUGGESTED_GROUPS = (128, 64, 32)

Group = tuple[str, ...]
Needs = dict[Group, tuple[frozenset[str], float | None]]


@dataclass(frozen=True)
class LayerTask:
    """A linear layer to be compressed: its shape [N, K], the stage that has the last word, its scheme.

    prune: the stage that chooses its mask, None where it stays dense; `stage` itself where nothing quantizes it.
    """

    name: str
    shape: tuple[int, int]
    stage: Stage
    scheme: Scheme
    prune: Stage | None = None

    @property
    def needs(self) -> frozenset[str]:
        """The input statistics that its stages want."""
        return self.stage.needs | (frozenset() if self.prune is None else self.prune.needs)

    @property
    def method(self) -> str:
        """What is done to it, in the recipe's words: "gptq", "sparsegpt", "sparsegpt+gptq"."""
        stages = [stage for stage in (self.prune, self.stage) if stage is not None]
        return "+".join(dict.fromkeys(stage.method for stage in stages))


@dataclass(frozen=True)
class TransformTask:
    """A transform stage and, per block index, the pairs it works on."""

    stage: Stage
    pairs: dict[int, tuple[Pair, ...]]


@dataclass(frozen=True)
class Assignment:
    """All tasks of a recipe on one model. untouched: linear layers left alone, with the reason. spared: those that no
    stage prunes although its targets name them."""

    layers: dict[str, LayerTask]
    transforms: tuple[TransformTask, ...]
    untouched: dict[str, str]
    notes: tuple[str, ...]
    spared: frozenset[str] = frozenset()

    @property
    def needs_calibration(self) -> bool:
        return any(task.needs for task in self.layers.values()) or any(task.stage.needs for task in self.transforms)


def assign(recipe: Recipe, skeleton: Skeleton, dense: Mapping[str, float] = NOTHING) -> Assignment:
    """Match the recipe's stages against `skeleton`. Where two quantize stages name a layer, the later one holds.

    dense: layers that no stage prunes, with the KL divergence for whose sake they are spared.

    Raises InputError, with the recipe path or layer and the mend, for patterns that match nothing, shapes that the
    format refuses, a scheme that the method cannot make, siblings under different schemes, embeddings, and a transform
    or pruning behind the quantization of its layers, or a second pruning.
    """
    layers: dict[str, LayerTask] = {}
    prunes: dict[str, Stage] = {}
    transforms: list[TransformTask] = []
    notes: list[str] = []
    for stage in recipe.stages:
        chosen = _select(stage, skeleton)
        if stage.kind == "transform":
            _refuse_late(stage, chosen, layers)
            transforms.append(_transform(stage, skeleton, chosen))
            continue
        if stage.kind == "prune":
            _refuse_late(stage, chosen, layers)
            twice = next((name for name in chosen if name in prunes), None)
            if twice is not None:
                raise InputError(f"{stage.where}: {prunes[twice].where} prunes {twice} already: ignore it here", USAGE)
            prunes |= {name: stage for name in chosen if name not in dense}
            continue
        _check_method(stage)
        again = [name for name in chosen if name in layers]
        if again:
            notes.append(f"{stage.where} replaces the earlier scheme of {len(again)} layers")
        for name in chosen:
            assert stage.scheme is not None, "the recipe gives every quantize stage one"
            layers[name] = _task(name, skeleton.shape(name), stage, prunes.get(name))
    layers |= {
        name: _task(name, skeleton.shape(name), stage, stage) for name, stage in prunes.items() if name not in layers
    }
    if not layers:
        raise InputError(
            "recipe: field 'stages' has no quantize or prune stage: add one, transforms alone save nothing", USAGE
        )
    notes += _larger_than_kept(layers.values())
    notes += [f"{name} is kept dense: pruned alone it costs a KL of {kl:.3g}" for name, kl in dense.items()]
    ordered = {name: layers[name] for name in skeleton.linears if name in layers}
    _check_formats(list(ordered.values()))
    _check_siblings(ordered, skeleton)
    for number, task in enumerate(transforms):
        transforms[number], note = _in_front_of(task, ordered, skeleton)
        notes += note
    untouched = {name: _why_untouched(name, skeleton) for name in skeleton.linears if name not in layers}
    untouched |= {name: f"kept dense: pruned alone, KL {dense[name]:.3g}" for name in untouched if name in dense}
    return Assignment(ordered, tuple(transforms), untouched, tuple(notes), frozenset(dense))


def _refuse_late(stage: Stage, chosen: Sequence[str], layers: Mapping[str, LayerTask]) -> None:
    """Raise InputError where a stage before this one has put a layer on its grid already."""
    late = next((name for name in chosen if name in layers), None)
    if late is not None:
        raise InputError(f"{stage.where}: an earlier stage quantizes {late}: put the {stage.kind} stage first", USAGE)


def _task(name: str, shape: tuple[int, int], stage: Stage, prune: Stage | None) -> LayerTask:
    """What is done to a layer, under the scheme that a mask makes of the stage's own.

    Raises InputError for a mask that nothing stores: on an asymmetric grid, beside outlier columns, or of another
    pattern than 2:4 with floats.
    """
    scheme = FLOATS if stage.scheme is None else stage.scheme
    if prune is None or prune.pattern is None:
        return LayerTask(name, shape, stage, scheme)
    if not scheme.grid.symmetric or scheme.threshold is not None:
        kind = "is asymmetric" if scheme.threshold is None else "has outlier columns"
        raise InputError(
            f"{stage.where}: {scheme.name} {kind}, and no format stores that with pruned weights: use a symmetric "
            f"scheme for {name}, or ignore it in the prune stage",
            USAGE,
        )
    if shape[1] % prune.pattern.of:
        raise InputError(
            f"{prune.where}.targets: {name} has {shape[1]} input columns, not a multiple of {prune.pattern.of}: ignore "
            "it there",
            USAGE,
        )
    sparse = pruned(scheme, prune.pattern)
    if sparse.format == FLOATS.format:
        raise InputError(
            f"{prune.where}.pattern: {prune.pattern} of floats is stored by no format: use 2:4, or quantize {name} too",
            USAGE,
        )
    return LayerTask(name, shape, stage, sparse, prune)


def _larger_than_kept(tasks: Iterable[LayerTask]) -> list[str]:
    """A note about layers whose pruned weights are stored as zeros, since only 2:4 has a format and kernels."""
    zeros = [task for task in tasks if task.prune is not None and task.scheme.format != sparse24.NAME]
    if not zeros:
        return []
    scheme = zeros[0].scheme
    return [
        f"{len(zeros)} layers pruned to {scheme.pattern} are stored and run at full size, as {scheme.format} with "
        f"zeros ({zeros[0].name}, ...): only {sparse24.PATTERN} has a format and kernels"
    ]


def _select(stage: Stage, skeleton: Skeleton) -> list[str]:
    """The linear layers a stage names. Routers and what lies outside the blocks count only when named exactly."""
    classes = skeleton.classes()
    targets = ("Linear",) if stage.targets == EVERY_BLOCK_LINEAR else stage.targets
    named = select(classes, targets, stage.ignore, stage.where)
    exact = {name for name in named if any(name == t or name.endswith("." + t) for t in stage.targets)}
    for name in sorted(exact):
        if classes[name] == "Embedding":
            raise InputError(f"{stage.where}.targets: {name}: no scheme stores an embedding: leave it out", USAGE)
        if skeleton.tied and name == skeleton.output_name():
            raise InputError(f"{stage.where}.targets: {name} would part from the tied embedding: leave it out", USAGE)
        if skeleton.outside(name) and stage.needs:
            raise InputError(
                f"{stage.where}.targets: {name} lies outside the blocks, where {stage.method} sees no inputs: "
                "give it a stage of its own with method rtn",
                USAGE,
            )
    inside = [
        name
        for name in named
        if name in exact or not (classes[name] == "Embedding" or skeleton.outside(name) or _is_router(name))
    ]
    if not inside:
        raise InputError(f"{stage.where}: no linear layer is left to work on: widen targets or ignore less", USAGE)
    return inside


def _why_untouched(name: str, skeleton: Skeleton) -> str:
    if skeleton.outside(name):
        return "tied to the embedding" if skeleton.tied and name == skeleton.output_name() else "outside the blocks"
    return "router" if _is_router(name) else "not targeted by any stage"


def _is_router(name: str) -> bool:
    return name.rpartition(".")[2] in ROUTERS


def _transform(stage: Stage, skeleton: Skeleton, chosen: Sequence[str]) -> TransformTask:
    wanted = set(chosen)
    found = {
        index: tuple(pair for pair in _pairs_for(stage, skeleton, index) if wanted.issuperset(pair.consumers))
        for index in range(len(skeleton.blocks))
    }
    if not any(found.values()):
        raise InputError(f"{stage.where}: no pair of layers has all its consumers among the targets: widen them", USAGE)
    return TransformTask(stage, found)


def _permutes(stage: Stage) -> bool:
    """Whether a transform moves channels, which only pairs of linear layers allow and only masks reward."""
    return hasattr(methods.find("transform", stage.method), "order")


def _pairs_for(stage: Stage, skeleton: Skeleton, index: int) -> list[Pair]:
    """The pairs of block `index` that a transform can work on."""
    permutes = _permutes(stage)
    return [pair for pair in pairs(skeleton, index) if pair.kind == "linear" or not permutes]


def _in_front_of(
    task: TransformTask, layers: dict[str, LayerTask], skeleton: Skeleton
) -> tuple[TransformTask, list[str]]:
    """`task` without the pairs whose consumers stay in float: their error has no rounding to be smoothed for.

    Also a note, if any, about the pairs that it leaves out although some of their layers are quantized.
    """
    stage = task.stage
    if _permutes(stage):
        rounded = {name for name, layer in layers.items() if layer.scheme.pattern == sparse24.PATTERN}
        served, serves = f"pruned to {sparse24.PATTERN}", f"prunes to {sparse24.PATTERN}"
    else:
        rounded = {name for name, layer in layers.items() if layer.scheme.grid.bits != FLOAT_BITS}
        served, serves = "quantized", "quantizes"
    kept = {index: tuple(p for p in found if rounded >= set(p.consumers)) for index, found in task.pairs.items()}
    if not any(kept.values()):
        raise InputError(f"{stage.where}: none of its layers is {served} by a later stage: leave it out", USAGE)
    possible = [(index, pair) for index in kept for pair in _pairs_for(stage, skeleton, index)]
    dropped = [pair for index, pair in possible if pair not in kept[index] and not rounded.isdisjoint(pair.consumers)]
    if not dropped:
        return TransformTask(stage, kept), []
    note = (
        f"{stage.where}: {stage.method} leaves {len(dropped)} of {len(possible)} pairs alone, whose layers it does not "
        f"name or no later stage {serves} ({dropped[0].producer} with {', '.join(dropped[0].consumers)}, ...)"
    )
    return TransformTask(stage, kept), [note]


def _check_method(stage: Stage) -> None:
    """Outlier columns are found by the methods that ask for them, which store nothing else."""
    assert stage.scheme is not None, "the recipe gives every quantize stage one"
    outliers = stage.scheme.threshold is not None
    if outliers != ("outliers" in stage.needs):
        able = [
            name
            for name in methods.names(stage.kind)
            if ("outliers" in methods.find(stage.kind, name).NEEDS) == outliers
        ]
        raise InputError(
            f"{stage.where}.quantize: method {stage.method} cannot make {stage.scheme.name}: use {' or '.join(able)}, "
            "or change the scheme",
            USAGE,
        )


def block_needs(linears: list[str], assignment: Assignment, index: int) -> Needs:
    """What block `index` must collect per group of layers with a shared input: statistics, outlier threshold."""
    wanted: Needs = {}
    for group in input_groups(linears):
        tasks = [assignment.layers[name] for name in group if name in assignment.layers]
        needs = frozenset[str]().union(*(task.needs for task in tasks))
        for transform in assignment.transforms:
            if any(set(pair.consumers) & set(group) for pair in transform.pairs[index]):
                needs |= transform.stage.needs
        thresholds = [task.scheme.threshold for task in tasks if task.scheme.threshold is not None]
        wanted[group] = (needs, min(thresholds, default=None))
    return wanted


def _check_formats(layers: list[LayerTask]) -> None:
    """Refuse what a grid or format cannot say, naming every shape that fails and what would fit them all."""
    for task in layers:
        grid, (_, columns) = task.scheme.grid, task.shape
        if grid.group_size is not None and columns % grid.group_size:
            mine = [other for other in layers if other.stage == task.stage]
            fits = [g for g in SUGGESTED_GROUPS if all(other.shape[1] % g == 0 for other in mine)]
            bad = [other for other in mine if other.shape[1] % grid.group_size]
            options = " or ".join(str(size) for size in fits) or "'channel'"
            raise InputError(
                f"{task.stage.where}.quantize.group_size: {grid.group_size} does not divide the {columns} columns of "
                f"{task.name} (nor those of {len(bad) - 1} more layers): use {options}",
                USAGE,
            )
        reason = format_named(task.scheme.format).refuses(task.shape, grid)
        if reason:
            where = task.stage.where
            raise InputError(f"{where}: {task.name} cannot be stored: {reason}: ignore it or change the scheme", USAGE)


def _check_siblings(layers: dict[str, LayerTask], skeleton: Skeleton) -> None:
    """Layers that share their input are one matrix to the loaders that fuse them: one scheme or none."""
    for group in input_groups(skeleton.linears):
        tasks = [layers.get(name) for name in group]
        first = next((task for task in tasks if task is not None), None)
        for name, task in zip(group, tasks, strict=True):
            if first is not None and (task is None or task.scheme != first.scheme):
                fused = "/".join(member.rpartition(".")[2] for member in group)
                theirs = task.scheme.name if task else "not quantized"
                raise InputError(
                    f"{first.stage.where}: {first.name} is {first.scheme.name} and {name} is {theirs}, "
                    f"but loaders fuse them: give {fused} one scheme",
                    USAGE,
                )


def scale_dtype(recipe: Recipe, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype scales are stored in: the recipe's, or the model's own where that has 16 bits, else bfloat16."""
    if recipe.export.scale_dtype != "auto":
        return getattr(torch, recipe.export.scale_dtype)
    return model_dtype if model_dtype.itemsize == 2 else torch.bfloat16
