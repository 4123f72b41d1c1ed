"""The plan: one row per tensor, sizes, peak memory and disk, known before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from compress.architecture import CACHE_BYTES, SAMPLING_CACHE_BYTES, kv_bytes_per_token
from compress.assignment import Assignment, LayerTask, block_needs, scale_dtype
from compress.checkpoint.agreement import refuse_extra, refuse_missing, refuse_shape, strangers
from compress.checkpoint.layout import by_block
from compress.checkpoint.source import Source, dominant_dtype
from compress.errors import InputError
from compress.formats import format_named, int8_outlier
from compress.formats.grid import TensorSpec
from compress.kernels import build
from compress.kernels.pick import expected
from compress.model import Skeleton
from compress.recipe import Recipe

MIB = 1 << 20
# Resident memory of Python, torch and transformers before any weight is read, measured on CPU builds.
PROCESS_BYTES = 400 * MIB
ACTIVATION_BUDGET = 1 << 30
TOKENS_PER_BATCH = 2048
ROWS_COMPARED = 4096


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
    dropped: tensors of the source that are not written, with the reason.
    exact: False where calibration decides the size (outlier columns, layers kept dense): bytes are an estimate then.
    """

    assignment: Assignment
    rows: tuple[Row, ...]
    sections: tuple[tuple[str, dict[str, int]], ...]
    dropped: dict[str, str]
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


def make_plan(recipe: Recipe, source: Source, skeleton: Skeleton, assignment: Assignment, device: str = "cpu") -> Plan:
    """Plan `recipe` on `source`; reads no weight but a second copy of tied embeddings.

    device: where the result shall run. Raises InputError where config.json and the shards are not of one model, and
    where a target of `export.kernels` does not serve every layer or cannot be built here.
    """
    model_dtype = dominant_dtype(source.tensors)
    stored_dtype = scale_dtype(recipe, model_dtype)
    build.check(wanted_kernels(assignment, stored_dtype), recipe.export.kernels, "recipe: field 'export.kernels'")
    derived, copied = _check_tensors(source, skeleton)
    dropped = {**duplicates(source, skeleton), **derived}
    sparing = any(stage.keep_dense for stage in recipe.stages)
    wanted = assignment.needs_calibration or sparing
    tokens = recipe.calibration.samples * recipe.calibration.seqlen if wanted else 0
    notes = [*assignment.notes, *copied]
    if derived:
        notes.append(
            f"{len(derived)} stored tables that loaders compute themselves are dropped ({next(iter(derived))})"
        )
    undecided = sparing and not assignment.spared
    if undecided:
        notes.append("prune.keep_dense: which layers stay dense is found out by the run; sizes are those without them")
    positions = getattr(skeleton.config.get_text_config(), "max_position_embeddings", None)
    if tokens and positions and recipe.calibration.seqlen > positions:
        notes.append(
            f"calibration.seqlen {recipe.calibration.seqlen} is beyond the {positions} positions that the model was "
            f"made for (max_position_embeddings): give at most {positions}"
        )
    assignment = replace(assignment, notes=tuple(notes))
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
        kernel = expected(task.scheme, device) if task else ""
        rows.append(_row(name, info.shape, task, (info.nbytes, after), kernel))
    activations = tokens * skeleton.config.get_text_config().hidden_size * 4
    return Plan(
        assignment=assignment,
        rows=tuple(rows),
        sections=tuple(by_block(skeleton.blocks, stored).items()),
        dropped=dropped,
        scale_dtype=stored_dtype,
        exact=all(task.scheme.threshold is None for task in assignment.layers.values()) and not undecided,
        peak_memory=_peak_memory(recipe, source, skeleton, assignment),
        spill_bytes=max(0, activations - ACTIVATION_BUDGET),
        kv_bytes_per_token=_cache_bytes(recipe, skeleton, model_dtype),
        calibration_tokens=tokens,
    )


def _cache_bytes(recipe: Recipe, skeleton: Skeleton, model_dtype: torch.dtype) -> int:
    """Bytes of key and value cache per token: in the model's own dtype, unless the recipe asks for a narrower one."""
    itemsize, step = CACHE_BYTES[recipe.export.kv_cache]
    return kv_bytes_per_token(skeleton.dimensions, min(model_dtype.itemsize, itemsize), step)


def wanted_kernels(assignment: Assignment, stored_dtype: torch.dtype) -> build.Wanted:
    """What kernels that travel with the result are to serve."""
    return build.Wanted({name: (task.scheme, task.shape) for name, task in assignment.layers.items()}, stored_dtype)


def _check_tensors(source: Source, skeleton: Skeleton) -> tuple[dict[str, str], list[str]]:
    """Tensors to be dropped, with the reason, and notes. Raises InputError unless the shards hold the skeleton's model.

    Tensors outside the blocks that the model has no place for are copied: other loaders may know them.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in skeleton.model.state_dict().items()}
    output = f"{skeleton.output_name()}.weight" if skeleton.tied else ""
    missing = [name for name in wanted if name not in source.tensors and name != output]
    extra, derived = strangers(source.tensors, wanted)
    experts = [name for name in wanted if len(wanted[name]) == 3 and not skeleton.outside(name)]
    fused = [name for name in experts if name in missing]
    if fused:
        raise InputError(
            f"{source.folder}: {fused[0]!r}: transformers keeps the experts of model_type "
            f"{skeleton.config.model_type!r} as one tensor of {len(wanted[fused[0]])} dimensions, the shards expert by "
            "expert, and neither can be compressed yet: give a model without experts"
        )
    renamed = _renamed_head(missing, extra, wanted, source, skeleton)
    refuse_missing(source.folder, [name for name in missing if name not in renamed])
    # A block beyond the last one that config.json knows counts as inside too.
    row_of_blocks = skeleton.blocks[0].removesuffix("0")
    refuse_extra(source.folder, [name for name in extra if name.startswith(row_of_blocks)])
    for name in source.tensors.keys() & wanted.keys():
        refuse_shape(source.tensors[name], wanted[name])
    notes = [
        f"{name} is stored as {other}, which transformers renames and lmpress cannot run"
        for name, other in renamed.items()
    ]
    extra = [name for name in extra if name not in renamed.values()]
    if experts:
        notes.append(f"{len(experts)} tensors of experts are no linear layers and stay as they are ({experts[0]}, ...)")
    if extra:
        notes.append(f"{len(extra)} tensors belong to no layer of the model and are copied ({extra[0]}, ...)")
    return dict.fromkeys(derived, "a table that loaders compute"), notes


def _renamed_head(
    missing: list[str], extra: list[str], wanted: dict[str, tuple[int, ...]], source: Source, skeleton: Skeleton
) -> dict[str, str]:
    """The output weight and what it is stored as, where that is another name that transformers alone knows."""
    head = f"{skeleton.output_name()}.weight"
    if head not in missing:
        return {}
    alike = [name for name in extra if skeleton.outside(name) and source.tensors[name].shape == wanted[head]]
    return {head: alike[0]} if alike else {}


def duplicates(source: Source, skeleton: Skeleton) -> dict[str, str]:
    """The output weight, where a tied checkpoint stores the embedding a second time: it need not be written.

    Raises InputError where the two differ: transformers would then run them untied, and other loaders would not.
    """
    first, second = f"{skeleton.embedding()[0]}.weight", f"{skeleton.output_name()}.weight"
    if not skeleton.tied or second not in source.tensors or first == second:
        return {}
    rows = source.tensors[first].shape[0]
    for start in range(0, rows, ROWS_COMPARED):
        stop = min(start + ROWS_COMPARED, rows)
        if not torch.equal(source.read_rows(first, start, stop), source.read_rows(second, start, stop)):
            raise InputError(
                f"{source.folder / 'config.json'}: field 'tie_word_embeddings' is true, but tensor {second!r} differs "
                f"from {first!r}: set it to false there, or remove the tensor"
            )
    return {second: "a second copy of the tied embedding"}


def _specs(task: LayerTask, stored_dtype: torch.dtype) -> dict[str, TensorSpec]:
    return format_named(task.scheme.format).specs(task.shape, task.scheme.grid, stored_dtype)


def _most_bytes(task: LayerTask, stored_dtype: torch.dtype) -> dict[str, int]:
    """The most bytes that each stored tensor can take: any number of columns may turn out to be outliers."""
    specs = _specs(task, stored_dtype)
    if task.scheme.threshold is not None:
        specs = int8_outlier.specs(task.shape, task.scheme.grid, stored_dtype, outliers=task.shape[1])
    return {f"{task.name}.{suffix}": spec.nbytes for suffix, spec in specs.items()}


def _row(name: str, shape: tuple[int, ...], task: LayerTask | None, sizes: tuple[int, int], kernel: str) -> Row:
    """sizes: bytes before and after."""
    bits = 8 * sizes[1] / max(1, prod(shape))
    if task is None:
        return Row(name, shape, "copy", "", "dense", kernel, bits, *sizes)
    method, scheme = task.method, task.scheme
    group = f" g{scheme.grid.group_size}" if scheme.grid.group_size else ""
    return Row(name, shape, method, scheme.name + group, scheme.format, kernel, bits, *sizes)


def _peak_memory(recipe: Recipe, source: Source, skeleton: Skeleton, assignment: Assignment) -> int:
    """Predicted peak resident bytes: the largest block in float32 with its Hessians, and the activations.

    A model's depth does not enter, unless it writes its own calibration text: then all of it is in memory. Beside a
    block there is either a batch of tokens on its way through it, or the solver with the one group that it works on.
    """
    sizes = {name: info.nbytes for name, info in source.tensors.items() if skeleton.outside(name)}
    largest = max(sizes.values(), default=0)
    calibration, width = recipe.calibration, skeleton.dimensions.hidden_size
    if not assignment.needs_calibration:
        return PROCESS_BYTES + max(largest, *_blocks_bytes(skeleton, assignment, 0))
    tokens = calibration.samples * calibration.seqlen
    widest = max(task.shape[0] for task in assignment.layers.values())
    activations = min(4 * tokens * width, ACTIVATION_BUDGET)
    batch = 4 * min(tokens, TOKENS_PER_BATCH) * (3 * widest + 6 * width)
    front = sum(sizes.get(name, 0) for name in skeleton.front_parameters())
    writer = _writer_bytes(recipe, source, skeleton) if calibration.source == "self" else 0
    return PROCESS_BYTES + max(largest, writer, activations + max(front, *_blocks_bytes(skeleton, assignment, batch)))


def _writer_bytes(recipe: Recipe, source: Source, skeleton: Skeleton) -> int:
    """Bytes of the whole model in float32, writing text, with the keys and values of the sequences side by side."""
    sequence = kv_bytes_per_token(skeleton.dimensions, torch.float32.itemsize) * recipe.calibration.seqlen
    weights = sum(prod(info.shape) for info in source.tensors.values())
    return 4 * weights + max(sequence, min(recipe.calibration.samples * sequence, SAMPLING_CACHE_BYTES))


def _blocks_bytes(skeleton: Skeleton, assignment: Assignment, batch: int) -> list[int]:
    """Bytes that each block takes at its worst moment."""
    return [_block_bytes(index, skeleton, assignment, batch) for index in range(len(skeleton.blocks))]


def _block_bytes(index: int, skeleton: Skeleton, assignment: Assignment, batch: int) -> int:
    linears = skeleton.block_linears(index)
    shapes = {name: skeleton.shape(name) for name in linears}
    weights = 4 * sum(prod(shape) for shape in shapes.values())
    hessians, solver = 0, 0
    for group, (needs, _) in block_needs(linears, assignment, index).items():
        size = sum(prod(shapes[name]) for name in group if name in assignment.layers)
        square = 4 * shapes[group[0]][1] ** 2 if "hessian" in needs else 0
        hessians += square
        # Two matrices for the factor beside the Hessian; the group's weights as read, as solved, and as integers; where
        # they are pruned too, what is kept, its gradient and the mask.
        pruned = any(assignment.layers[name].prune is not None for name in group if name in assignment.layers)
        solver = max(solver, 3 * square + (20 if pruned else 12) * size)
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
