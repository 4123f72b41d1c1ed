"""The GPU kernel: exported cubins multiply packed weights on NVIDIA GPUs, launched through cuda-core without Triton.

Which binaries run in which order and with which grids is told by the plans of triton/launch.py; this file brings the
weights into the layout that they read, hands each step its pointers, and keeps to the rule of `build.runnable`.
Activations are 16-bit, of the type of the scales: the binaries for it are what travels with the checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from compress.errors import InputError
from compress.formats import format_named, int8_outlier, pack_quantized, sparse24
from compress.formats.grid import FLOAT_BITS
from compress.formats.scheme import Scheme
from compress.kernels import aot, build, driver
from compress.kernels.sparse import launch as sparse
from compress.kernels.sparse.layout import group_scales, register_metadata, register_values
from compress.kernels.triton import launch, layout

logger = logging.getLogger(__name__)

# Cubins run on later chips of the same generation (8.x), but from sm_90 on Triton uses features of exactly one chip.
TARGETS = {(9, 0): "sm_90", (10, 0): "sm_100"}
ANY_OF_GENERATION = {8: "sm_80"}
DTYPES = {name: dtype for dtype, name in build.DTYPE_NAMES.items()}
BUFFER_TYPES = {**DTYPES, "fp32": torch.float32, "i8": torch.int8, "i32": torch.int32}

packed_plan = lru_cache(maxsize=4096)(launch.packed_product)
int8_plan = lru_cache(maxsize=4096)(launch.int8_product)
sparse_plan = lru_cache(maxsize=4096)(sparse.product)
attention_plan = lru_cache(maxsize=4096)(launch.attention)


@dataclass(frozen=True)
class Prepared:
    """A weight [N, K] on its device in the layout of its kernels.

    packing: of pack-quantized weights, or of 2:4 ones; None for dense int8. pointers: the weight's arguments by name,
    None for null. outliers: number of outlier columns, None for a format without. counts: int64 [2] where there are
    such columns.
    """

    rows: int
    columns: int
    dtype: torch.dtype
    processors: int
    kernels: Mapping[str, driver.Loaded]
    pointers: Mapping[str, Tensor | None]
    packing: launch.Packing | sparse.Kept | None = None
    outliers: int | None = None
    threshold: float = 0.0

    def plan(self, tokens: int) -> launch.Plan:
        """What is launched for `tokens` tokens."""
        shape = launch.Shape(tokens, self.rows, self.columns)
        name = build.DTYPE_NAMES[self.dtype]
        if isinstance(self.packing, sparse.Kept):
            return sparse_plan(shape, self.packing, name, self.processors)
        if self.packing is not None:
            return packed_plan(shape, self.packing, name, self.processors)
        return int8_plan(shape, name, self.processors, self.outliers, self.threshold)


@dataclass(frozen=True)
class CudaKernel:
    """Multiplies on NVIDIA GPUs with the binaries of the checkpoint in `folder` or of our own making.

    dtype: of the activations. trusted: run the checkpoint's binaries although this machine did not build them.
    """

    dtype: torch.dtype = torch.bfloat16
    folder: Path | None = None
    trusted: bool = False
    NAME: ClassVar[str] = "cuda"

    def refuses(self, scheme: Scheme, device: torch.device) -> str | None:
        """The reason why weights of `scheme` cannot be multiplied on `device`, or None."""
        if device.type != "cuda":
            return "runs on NVIDIA GPUs alone"
        if torch.version.hip is not None:
            return "launches no AMD kernels: hsaco files are exported for others"
        reason = driver.unavailable()
        if reason is not None:
            return reason
        capability = torch.cuda.get_device_capability(device)
        target = target_of(capability)
        if target is None:
            return f"has no binaries for compute capability {capability[0]}.{capability[1]}"
        if self.dtype not in build.DTYPE_NAMES:
            return f"multiplies 16-bit activations, not {self.dtype}: load the model with --dtype bfloat16"
        return build.refuses(scheme, self.dtype, target)

    def prepare(self, tensors: dict[str, Tensor], scheme: Scheme, device: torch.device) -> Prepared:
        """Stored `tensors` (by suffix) on `device`, in the layout of the kernels, and the kernels loaded.

        Raises InputError for a shape or scales that they do not take, and where no binary may run here.
        """
        rows, columns, dtype, pointers = arrange(tensors, scheme, device)
        if dtype != self.dtype:
            raise InputError(
                f"kernel cuda: scales are {dtype} and activations {self.dtype}: load the model with --dtype "
                f"{str(dtype).removeprefix('torch.')}"
            )
        target = target_of(torch.cuda.get_device_capability(device))
        assert target is not None, "refuses() comes first"
        wanted = [variant for variant in aot.variants() if build.serves(variant, scheme, dtype)]
        counted = scheme.format == int8_outlier.NAME
        return Prepared(
            rows,
            columns,
            dtype,
            torch.cuda.get_device_properties(device).multi_processor_count,
            {variant.name: _loaded(self, variant.name, target, device) for variant in wanted},
            pointers,
            packing_of(scheme),
            len(tensors["outlier_columns"]) if counted else None,
            (scheme.threshold or 0.0) if counted else 0.0,
        )

    def matmul(self, x: Tensor, prepared: Prepared) -> Tensor:
        """x [..., K] times the transposed weight: [..., N], in the dtype of x, which is that of the scales."""
        if x.dtype != prepared.dtype:
            raise ValueError(f"activations are {x.dtype}, and the kernels were loaded for {prepared.dtype}")
        tokens = x.reshape(-1, prepared.columns).contiguous()
        out = x.new_empty(len(tokens), prepared.rows)
        if len(tokens):
            plan = prepared.plan(len(tokens))
            run(plan, prepared.kernels, {**prepared.pointers, "x": tokens, "out": out})
        return out.view(*x.shape[:-1], prepared.rows)

    def outlier_counts(self, prepared: Prepared) -> tuple[int, int] | None:
        """(activations over the threshold outside the outlier columns, activations seen); None without such columns."""
        counts = prepared.pointers.get("counts")
        if counts is None:
            return None
        missed, seen = counts.tolist()
        return missed, seen


@dataclass(frozen=True)
class PagedCache:
    """Keys and values [pages, h, PAGE, d] of one layer, float32 scales [pages, h, PAGE] where they are int8.

    table: int32 [B, pages of the longest sequence], a sequence's page numbers in order. lengths: int32 [B].
    """

    keys: Tensor
    values: Tensor
    table: Tensor
    lengths: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


@dataclass(frozen=True)
class Attention:
    """Decode attention over a paged cache on one device: one token per sequence asks."""

    heads: launch.Heads
    scores: launch.Scores
    kernel: CudaKernel = field(default_factory=CudaKernel)

    def __call__(self, query: Tensor, cache: PagedCache) -> Tensor:
        """query [B, H, d], 16-bit: what it attends to, [B, H, d]. Raises InputError for heads that no binary serves."""
        device = query.device
        target = target_of(torch.cuda.get_device_capability(device))
        if target is None or query.dtype not in build.DTYPE_NAMES:
            raise InputError(f"kernel cuda: has no attention for {query.dtype} on {device}: use the reference")
        sequences, limit = cache.table.shape
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        plan = attention_plan(self.heads, self.scores, (sequences, limit), build.DTYPE_NAMES[query.dtype], processors)
        kernels = {step.name: _loaded(self.kernel, step.name, target, device) for step in plan.steps}
        out = torch.empty_like(query)
        whole = {"partial": None, "logarithms": None}  # What a plan of one part does without.
        run(plan, kernels, {**whole, **vars(cache), "query": query.contiguous(), "out": out})
        return out


def target_of(capability: tuple[int, int]) -> str | None:
    """The target whose cubins run on a GPU of this compute capability; None if there is none."""
    return TARGETS.get(capability) or ANY_OF_GENERATION.get(capability[0])


def arrange(
    tensors: dict[str, Tensor], scheme: Scheme, device: torch.device
) -> tuple[int, int, torch.dtype, dict[str, Tensor | None]]:
    """(N, K, dtype of activations, arguments of the weight's kernels by name) for stored `tensors` (by suffix).

    Raises InputError for scales or a shape that no binary takes.
    """
    stored = {suffix: tensor.to(device) for suffix, tensor in tensors.items()}
    dtype = stored["weight_values" if scheme.grid.bits == FLOAT_BITS else "weight_scale"].dtype
    shapes = {suffix: tuple(tensor.shape) for suffix, tensor in stored.items()}
    rows, columns = format_named(scheme.format).shape(shapes, scheme.grid)
    if dtype not in build.DTYPE_NAMES:
        raise InputError(f"kernel cuda: scales are {dtype}, not 16 bits wide: export with scale_dtype: auto")
    shape, packing = launch.Shape(1, rows, columns), packing_of(scheme)
    if isinstance(packing, sparse.Kept):
        reason = sparse.refuses(shape, packing, build.DTYPE_NAMES[dtype])
    else:
        reason = launch.product_refuses(shape, build.DTYPE_NAMES[dtype], packing)
    if reason is not None:
        raise InputError(f"kernel cuda: {reason}: leave this layer out of the recipe, or run it with --device cpu")
    if scheme.format == pack_quantized.NAME:
        return rows, columns, dtype, _packed(stored, scheme)
    if scheme.format == sparse24.NAME:
        return rows, columns, dtype, _sparse(stored, scheme)
    return rows, columns, dtype, _int8(stored, columns)


def packing_of(scheme: Scheme) -> launch.Packing | sparse.Kept | None:
    """What plans must know of weights of `scheme`: None for dense int8."""
    if scheme.format == sparse24.NAME:
        return build.kept_values(scheme)
    return build.packing(scheme) if scheme.format == pack_quantized.NAME else None


def run(plan: launch.Plan, kernels: Mapping[str, driver.Loaded], pointers: Mapping[str, Tensor | None]) -> None:
    """Launch the steps of `plan` one after the other, with buffers of its own."""
    device = kernels[plan.steps[0].name].device
    held = dict(pointers)
    for name, (kind, shape) in plan.buffers.items():
        held[name] = torch.empty(shape, dtype=BUFFER_TYPES[kind], device=device)
    for step in plan.steps:
        loaded = kernels[step.name]
        driver.launch(loaded, step.grid, arguments(loaded.entry.arguments, step, held))


def arguments(
    signature: tuple[tuple[str, str], ...], step: launch.Step, pointers: Mapping[str, Tensor | None]
) -> dict[str, driver.Value]:
    """The values that a step's kernel takes. Raises ValueError for one that neither the step nor the pointers have."""
    values: dict[str, driver.Value] = {}
    for name, kind in signature:
        source: Mapping[str, driver.Value] = pointers if kind.startswith("*") else step.scalars
        if name in source:
            values[name] = source[name]
        elif name not in driver.NOTHING:
            raise ValueError(f"{step.name} takes {name}, and its plan gives none")
    return values


def _packed(stored: dict[str, Tensor], scheme: Scheme) -> dict[str, Tensor | None]:
    grid = scheme.grid
    zero = pack_quantized.unpack_zero(stored, grid)
    if zero is not None:
        zero = layout.split_groups(zero, grid.group_size)[0]
    return {
        "words": layout.blocked(stored["weight_packed"], grid.bits),
        "scales": layout.split_groups(stored["weight_scale"], grid.group_size)[0].contiguous(),
        "zeros": zero,
        "partial": None,
    }


def _sparse(stored: dict[str, Tensor], scheme: Scheme) -> dict[str, Tensor | None]:
    bits, scales = scheme.grid.bits, stored.get("weight_scale")
    if scales is not None:
        grouped = bits == 4
        scales = group_scales(layout.split_groups(scales, scheme.grid.group_size)[0]) if grouped else scales.flatten()
    return {
        "values": register_values(stored["weight_values"], bits),
        "metadata": register_metadata(stored["weight_indices"], bits),
        "scales": scales,
        "steps": None,
        "partial": None,
    }


def _int8(stored: dict[str, Tensor], columns: int) -> dict[str, Tensor | None]:
    pointers: dict[str, Tensor | None] = {
        "weight": stored["weight"].contiguous(),
        "scale": stored["weight_scale"].flatten().contiguous(),
        **dict.fromkeys(("ordinary", "outlier_columns", "outlier_weight", "gathered", "counts", "partial")),
    }
    if "outlier_columns" in stored:
        kept = stored["outlier_columns"].to(torch.int32).contiguous()
        ordinary = torch.ones(columns, dtype=torch.int8, device=kept.device)
        ordinary[kept.long()] = 0
        tile = launch.TILES["w8a8_narrow"]["TILE"]
        pointers |= {
            "ordinary": ordinary,
            "outlier_columns": kept,
            "outlier_weight": layout.outlier_tiles(stored["outlier_weight"].to(stored["weight_scale"].dtype), tile),
            "counts": torch.zeros(2, dtype=torch.int64, device=kept.device),
        }
    return pointers


@cache
def _loaded(kernel: CudaKernel, name: str, target: str, device: torch.device) -> driver.Loaded:
    """The variant called `name` on `device`, once per process."""
    variant = next(variant for variant in aot.variants() if variant.name == name)
    built = build.runnable(variant, target, kernel.folder, kernel.trusted)
    return driver.load(built, device)
