"""A checkpoint's tensors put into a network built on meta: every name and shape is checked before a weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.checkpoint import Checkpoint
from compress.checkpoint.agreement import MEND, refuse_extra, refuse_missing, refuse_shape, strangers
from compress.checkpoint.quantization_config import parse
from compress.errors import InputError
from compress.formats import format_named, int8_outlier, sparse24
from compress.formats.grid import TensorSpec
from compress.formats.scheme import Scheme
from compress.kernels import Kernel
from compress.kernels.pick import KERNELS, pick

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class PackedLinear(nn.Module):
    """A linear layer whose weight stays packed; `kernel` multiplies it."""

    def __init__(self, kernel: Kernel, prepared: Any, bias: Tensor | None) -> None:
        super().__init__()
        self.kernel = kernel
        self.prepared = prepared
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        product = self.kernel.matmul(x, self.prepared)
        return product if self.bias is None else product + self.bias


def schemes_of(checkpoint: Checkpoint, network: nn.Module) -> dict[str, Scheme]:
    """The scheme of each linear layer of `network` that the checkpoint stores packed."""
    if checkpoint.quantization is None:
        return {}
    return parse(checkpoint.config, [name for name, module in network.named_modules() if isinstance(module, nn.Linear)])


@dataclass(frozen=True)
class Target:
    """Where a network goes: its device, the dtype it computes in, and the kernels it may use, best first."""

    device: torch.device
    dtype: torch.dtype
    kernels: Sequence[Kernel] = KERNELS


def assign(network: nn.Module, checkpoint: Checkpoint, schemes: Mapping[str, Scheme], target: Target) -> None:
    """Give every parameter of `network` (on meta) its tensor, and swap the modules named in `schemes` for packed ones.

    Floating-point tensors are converted to the target's dtype, one at a time; packed ones are taken as they are.
    Parameters that `network` shares stay shared, unless the checkpoint stores different values under their names.
    Raises InputError for a tensor that is missing, belongs nowhere, or has another shape or dtype than config.json asks
    for.
    """
    packed = {module: _packed_specs(network, checkpoint, module, scheme) for module, scheme in schemes.items()}
    shared = _shared_names(network, {f"{module}.weight" for module in schemes})
    _check(network, checkpoint, packed, shared)
    for names in shared:
        stored = [name for name in names if name in checkpoint.tensors]
        tensors = [_place(checkpoint.read(name), target) for name in stored]
        one = all(torch.equal(tensors[0], other) for other in tensors[1:])
        for name in names:
            _set(network, name, tensors[0] if one else tensors[stored.index(name)])
    for module, specs in packed.items():
        tensors_by_suffix = {suffix: checkpoint.read(f"{module}.{suffix}") for suffix in specs}
        _check_values(checkpoint, module, linear_named(network, module).weight.shape, tensors_by_suffix)
        _swap(network, module, schemes[module], tensors_by_suffix, target)


def linear_named(network: nn.Module, module: str) -> nn.Linear:
    linear = network.get_submodule(module)
    assert isinstance(linear, nn.Linear), module
    return linear


def _packed_specs(network: nn.Module, checkpoint: Checkpoint, module: str, scheme: Scheme) -> dict[str, TensorSpec]:
    """The tensors that stand for `module`'s weight, by suffix."""
    rows, columns = linear_named(network, module).weight.shape
    stored_format, grid = format_named(scheme.format), scheme.grid
    reason = stored_format.refuses((rows, columns), grid)
    if reason is not None:
        raise InputError(f"{checkpoint.folder / 'config.json'}: quantization_config: {module}: {reason}: {MEND}")
    specs = stored_format.specs((rows, columns), grid, torch.float32)
    columns_kept = checkpoint.tensors.get(f"{module}.outlier_columns")
    if scheme.format == int8_outlier.NAME and columns_kept is not None:
        count = columns_kept.shape[0] if columns_kept.shape else 0
        specs = int8_outlier.specs((rows, columns), grid, torch.float32, count)
    return specs


def _shared_names(network: nn.Module, packed: set[str]) -> list[list[str]]:
    """Names of the parameters and persistent buffers to be filled; names of one and the same tensor stand together."""
    groups: dict[int, list[str]] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        if name not in packed:
            groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def _check(
    network: nn.Module, checkpoint: Checkpoint, packed: Mapping[str, dict[str, TensorSpec]], shared: list[list[str]]
) -> None:
    """Raise InputError unless the checkpoint's headers hold exactly what `network` needs."""
    found = checkpoint.tensors
    wanted = {f"{module}.{suffix}": spec for module, specs in packed.items() for suffix, spec in specs.items()}
    missing = [name for name in wanted if name not in found]
    dense = network.state_dict(keep_vars=True)
    for names in shared:
        spec = TensorSpec(torch.float32, tuple(dense[names[0]].shape))
        wanted |= dict.fromkeys(names, spec)
        if not any(name in found for name in names):
            missing.append(names[0])
    refuse_missing(checkpoint.folder, missing)
    extra, _ = strangers(found, wanted)
    refuse_extra(checkpoint.folder, extra)
    for name, spec in wanted.items():
        if name not in found:
            continue
        info = found[name]
        refuse_shape(info, spec.shape)
        if info.dtype not in (FLOATS if spec.dtype.is_floating_point else (spec.dtype,)):
            wants = "a floating-point type" if spec.dtype.is_floating_point else str(spec.dtype)
            raise InputError(f"{info.file}: tensor {name!r} is {info.dtype}, not {wants}: {MEND}")


def _check_values(checkpoint: Checkpoint, module: str, shape: torch.Size, tensors: dict[str, Tensor]) -> None:
    """Raise InputError where a packed weight's own numbers contradict its shape."""
    stated = tensors.get("weight_shape")
    if stated is not None and stated.tolist() != list(shape):
        raise InputError(
            f"{checkpoint.folder}: tensor '{module}.weight_shape' says {stated.tolist()}, not {list(shape)}: {MEND}"
        )
    indices = tensors.get("weight_indices")
    if indices is not None:
        try:
            sparse24.unpack_indices(indices, shape[1])
        except ValueError as error:
            raise InputError(f"{checkpoint.folder}: tensor '{module}.weight_indices': {error}: {MEND}") from error
    columns = tensors.get("outlier_columns")
    if columns is not None and len(columns):
        ascending = bool((columns[1:] > columns[:-1]).all())
        if not ascending or columns[0] < 0 or columns[-1] >= shape[1]:
            raise InputError(
                f"{checkpoint.folder}: tensor '{module}.outlier_columns' is not an ascending list of columns below "
                f"{shape[1]}: {MEND}"
            )


def _place(tensor: Tensor, target: Target) -> Tensor:
    return tensor.to(target.device, target.dtype if tensor.is_floating_point() else tensor.dtype)


def _set(network: nn.Module, name: str, tensor: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    owner = network.get_submodule(parent)
    if leaf in owner._parameters:
        setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))
    else:
        setattr(owner, leaf, tensor)


def _swap(network: nn.Module, module: str, scheme: Scheme, tensors: dict[str, Tensor], target: Target) -> None:
    kernel = pick(scheme, target.device, target.kernels)
    packed = PackedLinear(kernel, kernel.prepare(tensors, scheme, target.device), linear_named(network, module).bias)
    network.set_submodule(module, packed)
