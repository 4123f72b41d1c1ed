"""The CPU kernel: every format and dense weights, multiplied by the C++ library.

Integer weights meet activations on int8 grids: one step per token where the scheme says so (W8A8, LLM_INT8), one step
per group of columns otherwise (W4A16, W8A16), which costs a little accuracy that a report states as its own line.
Sums of integer products are exact. Dense weights keep their type and are multiplied in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.errors import InputError
from compress.formats import format_named, int8_outlier, pack_quantized
from compress.formats.scheme import Scheme
from compress.kernels.cpu.layout import COLUMNS, byte_panels, column_panels, narrowest, nibble_panels, pair_panels
from compress.kernels.cpu.library import INT4, INT8, TYPES, Engine, LinearLayout
from compress.kernels.reference import LEVELS

# One activation step covers at most this many columns where a scale covers more (a scale per row).
LARGEST_GROUP = 128
GROUP_LEVELS = 127.0

# Columns of 8-bit products, each below 2^15, whose sum fits 32 bits.
MOST_COLUMNS = 1 << 16


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
        rows, columns = stored.q.shape
        if columns >= MOST_COLUMNS:
            raise InputError(f"a weight of {columns} columns: the CPU kernel sums up to {MOST_COLUMNS}: use groups")
        padded = columns + -columns % COLUMNS
        kept = {
            "weight": nibble_panels(stored.q) if scheme.grid.bits == 4 else byte_panels(stored.q),
            "scale": column_panels(stored.scale if stored.scale.dtype in TYPES else stored.scale.float()),
        }
        if stored.zero is not None:
            kept["zero"] = column_panels(stored.zero)
        layout = LinearLayout(rows=rows, columns=columns, padded_columns=padded)
        layout.type = INT4 if scheme.grid.bits == 4 else INT8
        layout.scale_type = TYPES[kept["scale"].dtype]
        layout.scale_group = scheme.grid.group_size or padded
        layout.group, layout.levels = padded, GROUP_LEVELS
        if scheme.format == pack_quantized.NAME:
            layout.group = activation_group(layout.scale_group)
        else:
            layout.levels = LEVELS[scheme.format]
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
    group = scheme.grid.group_size
    if group is not None and group % COLUMNS:
        return f"its groups are multiples of {COLUMNS} columns, not {group}"
    return None


def activation_group(scale_group: int) -> int:
    """Columns per activation step: as many as share a scale, or its largest divisor up to LARGEST_GROUP."""
    sizes = range(min(scale_group, LARGEST_GROUP), 0, -COLUMNS)
    return next((size for size in sizes if scale_group % size == 0 and size % COLUMNS == 0), scale_group)


def _pointing(layout: LinearLayout, tensors: dict[str, Tensor]) -> Prepared:
    for name, tensor in tensors.items():
        setattr(layout, name, tensor.data_ptr())
    return Prepared(layout, tensors)
