"""Shrinking: a smaller student cut out of a model. One file per method.

A method offers `reshape(config, settings, measured) -> (config, Cut)`: the student's config.json and what becomes of
the blocks. config names every size (`SIZES`) and, where it has them, a type per layer. measured: importances by name
(`MEASURED`), those of `needs(settings)`; None while nothing has been measured: sizes are final then, and the first
layers, heads or channels stand in for those that will be kept. Raises InputError for what the model has no room for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.errors import USAGE, InputError

# What the axes of a block's tensors are made of.
QUERY, KEY_VALUE, CHANNEL = "query", "key_value", "channel"
# Tensor of a block -> the axis that a cut may shorten, and what it is made of. Other tensors stay as they are.
AXES = {
    **{f"self_attn.q_proj.{part}": (0, QUERY) for part in ("weight", "bias")},
    **{f"self_attn.{name}.{part}": (0, KEY_VALUE) for name in ("k_proj", "v_proj") for part in ("weight", "bias")},
    "self_attn.o_proj.weight": (1, QUERY),
    **{f"mlp.{name}.{part}": (0, CHANNEL) for name in ("gate_proj", "up_proj") for part in ("weight", "bias")},
    "mlp.down_proj.weight": (1, CHANNEL),
}

BLOCK_INFLUENCE = "block_influence"
# Importance -> what it has a value for in each block: [blocks, units]; of the block itself, empty: [blocks].
MEASURED = {
    BLOCK_INFLUENCE: "",
    "channel_l2": CHANNEL,
    "channel_mean": CHANNEL,
    "head_l2": QUERY,
    "head_mean": QUERY,
}
Measured = Mapping[str, Tensor]

# Fields of config.json that a method may read and rewrite; derived ones must be spelt out before.
SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


@dataclass(frozen=True)
class Cut:
    """What becomes of a model's blocks.

    layers: for each block of the student, the number of the block that it is cut from. head_dim: rows of one head.
    units: heads or channels -> for each block of the student int64 [kept, members]: the mean of which units of the
    source block each kept one is. What is not named there stays as it is.
    """

    layers: tuple[int, ...]
    head_dim: int
    units: Mapping[str, tuple[Tensor, ...]]

    def tensor(self, layer: int, role: str, source: Tensor) -> Tensor:
        """The tensor `role` (its name within the block) of the student's block `layer`, in the dtype of `source`.

        source: the tensor of that name in the block it is cut from. Means are taken in float32 or wider.
        """
        axis, kind = AXES.get(role, (0, ""))
        if kind not in self.units:
            return source
        units = self.units[kind][layer].to(source.device)
        parts = source.unflatten(axis, (-1, self._rows(kind)))
        picked = parts.index_select(axis, units.flatten()).unflatten(axis, units.shape)
        if units.shape[1] == 1:
            return picked.flatten(axis, axis + 2).contiguous()
        wide = torch.promote_types(source.dtype, torch.float32)
        return picked.to(wide).mean(axis + 1).to(source.dtype).flatten(axis, axis + 1).contiguous()

    def shape(self, layer: int, role: str, source: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what `tensor` makes of a tensor of shape `source`."""
        axis, kind = AXES.get(role, (0, ""))
        if kind not in self.units:
            return source
        return (*source[:axis], len(self.units[kind][layer]) * self._rows(kind), *source[axis + 1 :])

    def carry(self, measured: Measured) -> dict[str, Tensor]:
        """Importances of the source as those of the student, for a cut that follows."""
        carried = {name: values[list(self.layers)] for name, values in measured.items()}
        for name, values in carried.items():
            units = self.units.get(MEASURED[name])
            if units is not None:
                carried[name] = torch.stack([row[kept].mean(1) for row, kept in zip(values, units, strict=True)])
        return carried

    def _rows(self, kind: str) -> int:
        return 1 if kind == CHANNEL else self.head_dim


def trail(cuts: tuple[Cut, ...], layer: int) -> tuple[int, tuple[tuple[Cut, int], ...]]:
    """The source's block behind the student's block `layer`, and each cut on the way with its own block's number."""
    steps = []
    for cut in reversed(cuts):
        steps.append((cut, layer))
        layer = cut.layers[layer]
    return layer, tuple(reversed(steps))


def cut_shape(steps: tuple[tuple[Cut, int], ...], role: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """What the cuts of `trail` make of a shape."""
    for cut, layer in steps:
        shape = cut.shape(layer, role, shape)
    return shape


def cut_tensor(steps: tuple[tuple[Cut, int], ...], role: str, tensor: Tensor) -> Tensor:
    """What the cuts of `trail` make of a tensor."""
    for cut, layer in steps:
        tensor = cut.tensor(layer, role, tensor)
    return tensor


def most_important(scores: Tensor | None, count: int) -> list[int]:
    """Indices of the `count` largest of `scores` [n], ascending; of equals the first. None: the first `count`."""
    if scores is None:
        return list(range(count))
    return sorted(torch.argsort(scores, descending=True, stable=True)[:count].tolist())


def refuse_growth(field: str, wanted: int, config: Mapping[str, Any], size: str) -> None:
    """Raise InputError unless `wanted`, the value of a method's `field`, is below config.json's `size`."""
    if wanted >= config[size]:
        kind = "is what the model has already" if wanted == config[size] else f"is more than the model's {config[size]}"
        raise InputError(f"{field}: {wanted} {kind} ({size}): give less", USAGE)


def share_kept(scores: Tensor, kept: Tensor) -> float:
    """The share of the summed importances [n] that the units `kept` hold; 1 where all are zero."""
    total = float(scores.sum())
    return float(scores[kept.flatten()].sum()) / total if total else 1.0
