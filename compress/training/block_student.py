"""One decoder block of a student in training form: compressed layers on their grids, floats as they will be stored."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from compress.distill.straight_through import GridLinear, Rounding
from compress.formats.scheme import Scheme
from compress.model import Skeleton
from compress.training.grid_layers import grid_layer, stored_parts


class AsStored(nn.Module):
    """A float32 parameter read as the dtype it is stored in: the gradient passes through the cast as it is."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, value: Tensor) -> Tensor:
        return value.to(self.dtype).float()


@dataclass(frozen=True)
class Layout:
    """How a model is stored.

    schemes: of its compressed layers, by module name. zeros: those of them that were pruned: where their format stores
    no mask, their zeros are held.
    """

    skeleton: Skeleton
    schemes: Mapping[str, Scheme]
    zeros: frozenset[str]


@dataclass(frozen=True)
class BlockStudent:
    """A block whose parameters all move and which computes, bit for bit, with the weights that `stored` gives.

    name: of the block in its model. floats: parameters off the grid, by name within the block, and the dtypes they are
    stored in. held: stored tensors that it has no parameter for, such as computed tables. order: of all stored tensors.
    """

    name: str
    module: nn.Module
    schemes: Mapping[str, Scheme]
    floats: Mapping[str, torch.dtype]
    held: Mapping[str, Tensor]
    order: tuple[str, ...]

    @property
    def layers(self) -> dict[str, GridLinear]:
        """Its compressed layers, by name within the block."""
        return {name: layer for name, layer in self.module.named_modules() if isinstance(layer, GridLinear)}

    @property
    def rules(self) -> dict[str, Rounding]:
        """What becomes of the inputs of layers that round them at run time, by full name."""
        return {f"{self.name}.{n}": layer.rounding for n, layer in self.layers.items() if layer.rounding is not None}

    @torch.no_grad()
    def stored(self) -> dict[str, Tensor]:
        """The tensors to write, by full name, on the CPU, in the order and dtypes in which the block was loaded."""
        found = dict(self.held)
        for name, layer in self.layers.items():
            full = f"{self.name}.{name}"
            found |= stored_parts(full, layer, self.schemes[full])
        for name, dtype in self.floats.items():
            found[f"{self.name}.{name}"] = _value(self.module, name).to("cpu", dtype, copy=True)
        return {name: found[name] for name in self.order}

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """What the block computes with: float32, by parameter name within the plain block."""
        floats = {name: _value(self.module, name).clone() for name in self.floats}
        return floats | {f"{name}.weight": layer.effective_weight() for name, layer in self.layers.items()}


def load_block(layout: Layout, index: int, tensors: Mapping[str, Tensor], device: torch.device) -> BlockStudent:
    """Block `index` as the stored `tensors` (by full name) say. Raises InputError for a layer that makes no sense."""
    name, plain = layout.skeleton.blocks[index], layout.skeleton.block(index)
    module = copy.deepcopy(plain)
    packed = [linear for linear in layout.skeleton.block_linears(index) if linear in layout.schemes]
    for linear in packed:
        prefix = f"{linear}."
        parts = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        layer = grid_layer(linear, parts, layout.schemes[linear], parts.pop("bias", None), linear in layout.zeros)
        module.set_submodule(linear.removeprefix(f"{name}."), layer)
    gridded = {f"{linear}.weight" for linear in packed}
    floats = {inner: f"{name}.{inner}" for inner, _ in plain.named_parameters() if f"{name}.{inner}" not in gridded}
    for inner, stored in floats.items():
        owner, leaf = _owner(module, inner)
        setattr(owner, leaf, nn.Parameter(tensors[stored].to(torch.float32, copy=True)))
        register_parametrization(owner, leaf, AsStored(tensors[stored].dtype))
    on_grid = {key for key in tensors if any(key.startswith(f"{linear}.") for linear in packed)}
    return BlockStudent(
        name=name,
        module=module.requires_grad_(True).to(device),
        schemes=layout.schemes,
        floats={inner: tensors[stored].dtype for inner, stored in floats.items()},
        held={key: tensor for key, tensor in tensors.items() if key not in {*on_grid, *floats.values()}},
        order=tuple(tensors),
    )


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, leaf = name.rpartition(".")
    return module.get_submodule(owner), leaf


def _value(module: nn.Module, name: str) -> Tensor:
    """The value of a parameter as the module computes with it."""
    owner, leaf = _owner(module, name)
    value = getattr(owner, leaf)
    assert isinstance(value, Tensor)
    return value
