"""Between stored tensors and layers that train on their grid, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from compress.checkpoint import manifest
from compress.distill.straight_through import GridLinear
from compress.errors import InputError
from compress.formats import format_named
from compress.formats.grid import Quantized
from compress.formats.scheme import Scheme
from compress.kernels.reference import round_activations


def grid_layer(name: str, parts: Mapping[str, Tensor], scheme: Scheme, bias: Tensor | None, zeros: bool) -> GridLinear:
    """The layer that the stored `parts`, by suffix, stand for under `scheme`.

    zeros: where its format stores no mask, all its zeros are what pruning left. Raises InputError, which calls the
    layer `name`, for parts that make no sense.
    """
    rounding = None
    try:
        found = format_named(scheme.format).unpack(dict(parts), scheme.grid)
        if zeros and found.mask is None:
            found = replace(found, mask=found.q != _zero(found))
        if scheme.activation_bits is not None:
            rounding = partial(round_activations, scheme=scheme, outlier_columns=found.outlier_columns)
        return GridLinear(found, scheme.grid, bias, rounding)
    except ValueError as error:
        raise InputError(f"layer {name!r}: {error}: copy or compress the model again") from error


def stored_parts(name: str, layer: GridLinear, scheme: Scheme) -> dict[str, Tensor]:
    """The tensors that `layer` is stored as under `scheme`, by full name, on the CPU; its bias is none of them."""
    packed = format_named(scheme.format).pack(layer.quantized(), scheme.grid)
    return {f"{name}.{suffix}": tensor.cpu() for suffix, tensor in packed.items()}


def pruned_layers(folder: Path) -> frozenset[str]:
    """The pruned layers: of patterns whose zeros are stored like any other value, only the manifest tells."""
    if not (folder / manifest.NAME).exists():
        return frozenset()
    return frozenset(row["name"] for row in manifest.read(folder).layers if "+" in row["scheme"])


def _zero(quantized: Quantized) -> Tensor | int:
    """The integers that stand for zero, per group or for all."""
    zero = quantized.zero
    return 0 if zero is None else zero.repeat_interleave(quantized.q.shape[1] // zero.shape[1], dim=1)
