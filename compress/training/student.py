"""A student: a network whose compressed layers train on their grids, and the tensors that it is stored as."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from compress.checkpoint import Checkpoint, open_checkpoint
from compress.checkpoint.quantization_config import stored_schemes
from compress.distill.straight_through import GridLinear
from compress.errors import USAGE, InputError, did_you_mean
from compress.formats.scheme import Scheme
from compress.matching import matches
from compress.model import build_skeleton
from compress.runtime.assign import Target, linear_named
from compress.runtime.transformers_engine import TransformersNetwork
from compress.training.grid_layers import grid_layer, pruned_layers, stored_parts
from compress.training.network import Network, fill
from compress.training_settings import Training

EVERYTHING = "*"


@dataclass(frozen=True)
class Student:
    """A network in training and the checkpoint that it came from, under whose names and dtypes it is stored again.

    schemes: of its compressed layers, by module name.
    """

    network: Network
    source: Checkpoint
    schemes: dict[str, Scheme]

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """What is trained, by the names that the model has for it."""
        return {name: one for name, one in self.network.model.named_parameters() if one.requires_grad}

    @torch.no_grad()
    def stored(self, prefix: str = "") -> dict[str, Tensor]:
        """The tensors to write, as they stand now: of the module (or the one tensor) called `prefix`, or all of them.

        Names, dtypes and shapes are those of the source. Floats are rounded to the dtype they have there.
        """
        names = [name for name in self.source.tensors if not prefix or f"{name}.".startswith(f"{prefix}.")]
        floats = self.network.model.state_dict()
        found: dict[str, Tensor] = {}
        for name in names:
            module, _, suffix = name.rpartition(".")
            if name in found:
                continue
            if module in self.schemes and suffix != "bias":
                layer = self.network.model.get_submodule(module)
                assert isinstance(layer, GridLinear), module
                packed = stored_parts(module, layer, self.schemes[module])
                found |= {part: tensor for part, tensor in packed.items() if part in names}
            elif name in floats:
                found[name] = floats[name].to("cpu", self.source.tensors[name].dtype)
            else:
                found[name] = self.source.read(name)  # a table that models compute for themselves
        return {name: found[name] for name in names}


def load_student(folder: Path, training: Training, device: torch.device) -> Student:
    """The model in `folder` in float32, its compressed layers on their grids; only what `training` names is trained.

    `training.train` holds globs over the names of parameters or of the modules that own them. A plain "*" stands for
    all of the decoder blocks and what norms or scales lie around them: embeddings and the output layer are held unless
    another pattern names them. Scales are trained where `training.refit` says so, as parameters `<module>.scale`. A
    layer that was pruned keeps its zeros; where its format does not tell which they are, every zero is held.
    Raises InputError for a checkpoint that is damaged or not understood, and for a pattern that names nothing.
    """
    checkpoint = open_checkpoint(Path(folder))
    skeleton = build_skeleton(checkpoint.folder)
    schemes = stored_schemes(checkpoint)
    model = skeleton.model
    fill(model, checkpoint, schemes, Target(device, torch.float32))
    zeros = pruned_layers(checkpoint.folder)
    for module, scheme in schemes.items():
        bias = linear_named(model, module).bias
        model.set_submodule(module, _on_grid(checkpoint, module, scheme, bias, module in zeros).to(device))
    network = Network(TransformersNetwork(model), skeleton.blocks, training.gradient_checkpointing)
    network.requires_grad_(False)
    named = dict(model.named_parameters(remove_duplicate=False))
    for name in _trained(network, named, training):
        named[name].requires_grad_(True)
    return Student(network, checkpoint, schemes)


def _on_grid(checkpoint: Checkpoint, module: str, scheme: Scheme, bias: Tensor | None, zeros: bool) -> GridLinear:
    """The layer `module` as it is stored."""
    prefix = f"{module}."
    names = [name for name in checkpoint.tensors if name.startswith(prefix) and name != f"{prefix}bias"]
    parts = {name.removeprefix(prefix): checkpoint.read(name) for name in names}
    try:
        return grid_layer(module, parts, scheme, bias, zeros)
    except InputError as error:
        raise InputError(f"{checkpoint.folder}: {error}") from error


def _trained(network: Network, named: Iterable[str], training: Training) -> list[str]:
    """The parameters that the patterns name. Raises InputError for a pattern without any."""
    named = [name for name in named if training.refit or not name.endswith(".scale")]
    modules = dict(network.model.named_modules())
    head = network.model.get_output_embeddings()
    held = [name for name, module in modules.items() if module is head or isinstance(module, nn.Embedding)]
    chosen: set[str] = set()
    for pattern in training.train:
        if pattern == EVERYTHING:
            hits = {name for name in named if not any(name.startswith(f"{module}.") for module in held)}
        else:
            hits = {name for name in named if _names(pattern, name, modules)}
        if not hits:
            near = did_you_mean(pattern, [*named, *{part for name in named for part in name.split(".")}])
            raise InputError(
                f"training.train: {pattern!r} matches no parameter{near}; give a glob over parameter names, such as "
                "'*.mlp.*', or 're:...'",
                USAGE,
            )
        chosen |= hits
    return [name for name in named if name in chosen]


def _names(pattern: str, name: str, modules: dict[str, nn.Module]) -> bool:
    module = name.rpartition(".")[0]
    try:
        return matches(pattern, name, "") or matches(pattern, module, type(modules[module]).__name__)
    except re.error as error:
        raise InputError(
            f"training.train: {pattern!r} is not a regular expression ({error}): mend the pattern", USAGE
        ) from None
