"""The CPU kernel: every format and dense weights, multiplied by the C++ library.

Integer weights meet activations on int8 grids: one step per token where the scheme says so (W8A8, LLM_INT8), one step
per group of columns otherwise (W4A16, W8A16), which costs a little accuracy that a report states as its own line.
Sums of integer products are exact. Dense weights keep their type and are multiplied in float32. Of 2:4 weights on
integer grids, kept values and their positions are all that is read; 2:4 floats become dense weights at load, so that no
fewer bytes are read than of those.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.errors import InputError
from compress.formats import format_named, int8_outlier, sparse24
from compress.formats.grid import FLOAT_BITS, Quantized
from compress.formats.scheme import Scheme
from compress.kernels.cpu.layout import (
    BLOCK,
    COLUMNS,
    byte_panels,
    column_panels,
    narrowest,
    nibble_panels,
    pair_panels,
    sparse_panels,
)
from compress.kernels.cpu.library import INT4, INT8, SPARSE4, SPARSE8, TYPES, Engine, LinearLayout
from compress.kernels.reference import LEVELS

# One activation step covers at most this many columns where a scale covers more (a scale per row).
LARGEST_GROUP = 128
GROUP_LEVELS = 127.0

# Columns of 8-bit products, each below 2^15, whose sum fits 32 bits.
MOST_COLUMNS = 1 << 16

# By bits, and whether with 2:4 sparsity.
_TYPES = {(4, False): INT4, (8, False): INT8, (4, True): SPARSE4, (8, True): SPARSE8}


@dataclass(frozen=True)
class Prepared:
    """A weight [N, K] in panels. `tensors` keeps alive what `layout` points to."""

    layout: LinearLayout
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class CpuKernel:
    """Multiplies with the threads of `engine`."""

    engine: Engine

    @property
    def NAME(self) -> str:
        return f"cpu-{self.engine.variant}"

    def refuses(self, scheme: Scheme, device: torch.device) -> str | None:
        """The reason why weights of `scheme` cannot be multiplied on `device`, or None."""
        return "runs on the CPU alone" if device.type != "cpu" else refuses(scheme)

    def prepare(self, tensors: dict[str, Tensor], scheme: Scheme, device: torch.device) -> Prepared:
        """Stored `tensors` (by suffix) turned into panels."""
        stored = format_named(scheme.format).unpack(tensors, scheme.grid)
        if scheme.grid.bits == FLOAT_BITS:
            return self.prepare_dense(stored.q)
        rows, columns = stored.q.shape
        if columns >= MOST_COLUMNS:
            raise InputError(f"a weight of {columns} columns: the CPU kernel sums up to {MOST_COLUMNS}: use groups")
        padded = columns + -columns % _step(scheme)
        kept = {
            "weight": _integer_panels(stored, scheme.grid.bits),
            "scale": column_panels(stored.scale if stored.scale.dtype in TYPES else stored.scale.float()),
        }
        if stored.zero is not None:
            kept["zero"] = column_panels(stored.zero)
        layout = LinearLayout(rows=rows, columns=columns, padded_columns=padded)
        layout.type = _TYPES[scheme.grid.bits, stored.mask is not None]
        layout.scale_type = TYPES[kept["scale"].dtype]
        layout.scale_group = scheme.grid.group_size or padded
        group = activation_group(scheme, columns)
        layout.group = padded if group == columns else group
        layout.levels = GROUP_LEVELS if scheme.activation_bits is None else LEVELS[scheme.format]
        if scheme.format == int8_outlier.NAME and stored.outlier_columns is not None:
            assert stored.outlier_weight is not None
            kept["counts"] = torch.zeros(2, dtype=torch.int64)
            kept["outlier_columns"] = stored.outlier_columns.to(torch.int32).contiguous()
            kept["outlier_weight"] = column_panels(stored.outlier_weight.to(kept["scale"].dtype))
            layout.outliers = len(stored.outlier_columns)
            layout.threshold = scheme.threshold or 0.0
        return _pointing(layout, kept)

    def prepare_dense(self, weight: Tensor) -> Prepared:
        """A float weight [N, K] in panels, in the narrowest type that holds it exactly."""
        weight = narrowest(weight)
        panels = pair_panels(weight) if weight.dtype == torch.bfloat16 else column_panels(weight)
        rows, columns = weight.shape
        padded = columns + -columns % COLUMNS if weight.dtype == torch.bfloat16 else columns
        layout = LinearLayout(rows=rows, columns=columns, padded_columns=padded, type=TYPES[panels.dtype])
        return _pointing(layout, {"weight": panels})

    def matmul(self, x: Tensor, prepared: Prepared) -> Tensor:
        """x [..., K] times the transposed weight: [..., N], in the dtype of x."""
        product = self.engine.multiply(prepared.layout, x.reshape(-1, x.shape[-1]).float())
        return product.to(x.dtype).view(*x.shape[:-1], product.shape[-1])

    def outlier_counts(self, prepared: Prepared) -> tuple[int, int] | None:
        """(activations over the threshold outside the outlier columns, activations seen); None without such columns."""
        if "counts" not in prepared.tensors:
            return None
        missed, seen = prepared.tensors["counts"].tolist()
        return missed, seen


def refuses(scheme: Scheme) -> str | None:
    """The reason why the library cannot multiply weights of `scheme`, told without having it, or None."""
    group, step = scheme.grid.group_size, _step(scheme)
    if group is not None and group % step:
        return f"its groups are multiples of {step} columns, not {group}"
    return None


def activation_group(scheme: Scheme, columns: int) -> int:
    """Columns per activation step of a layer of `columns` columns: all of them where there is a step per token.

    Else as many as share a scale, or the largest part of those that panels can be cut into, up to LARGEST_GROUP.
    """
    if scheme.activation_bits is not None:
        return columns
    scale_group = scheme.grid.group_size or columns
    sizes = range(LARGEST_GROUP, 0, -_step(scheme))
    return next((size for size in sizes if scale_group % size == 0), scale_group)


def _step(scheme: Scheme) -> int:
    """Columns that panels grow by."""
    return BLOCK if scheme.format == sparse24.NAME else COLUMNS


def _integer_panels(stored: Quantized, bits: int) -> Tensor:
    if stored.mask is not None:
        return sparse_panels(stored.q, stored.mask, bits)
    return nibble_panels(stored.q) if bits == 4 else byte_panels(stored.q)


def _pointing(layout: LinearLayout, tensors: dict[str, Tensor]) -> Prepared:
    for name, tensor in tensors.items():
        setattr(layout, name, tensor.data_ptr())
    return Prepared(layout, tensors)
