"""A model's skeleton on the meta device: its blocks, their linear layers, and which of them belong together."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from compress.architecture import Dimensions, dimensions, empty_model
from compress.errors import InputError

logger = logging.getLogger(__name__)

# Linear layers that read the same input. Loaders fuse them into one matrix, so they must share a scheme.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class Pair:
    """A producer whose output channels are the input channels of its consumers, so that a scale can move between them.

    kind "norm": the producer is a norm with weight [K], applied as (offset + weight) * normalized. kind "linear": a
    linear layer with weight [K / repeat, ...], each of whose heads of `head_size` outputs feeds `repeat` query heads.
    gates: linear layers whose outputs are multiplied with the producer's, channel by channel.
    """

    producer: str
    consumers: tuple[str, ...]
    kind: str
    offset: float = 0.0
    repeat: int = 1
    head_size: int = 1
    gates: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """Where a model family keeps the norm in front of its MLP, and what its norms add to their weight."""

    mlp_norm: str = "post_attention_layernorm"
    norm_offset: float = 0.0


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "gemma": Family(norm_offset=1.0),
    "gemma2": Family(mlp_norm="pre_feedforward_layernorm", norm_offset=1.0),
    "gemma3_text": Family(mlp_norm="pre_feedforward_layernorm", norm_offset=1.0),
}


@dataclass(frozen=True)
class Skeleton:
    """A causal language model of transformers whose parameters are on the meta device (buffers are real).

    blocks: names of the decoder blocks, in order. linears: names of every nn.Linear, in order.
    """

    model: nn.Module
    config: Any
    blocks: list[str]
    linears: list[str]

    def block(self, index: int) -> nn.Module:
        return self.model.get_submodule(self.blocks[index])

    def block_linears(self, index: int) -> list[str]:
        """Full names of the linear layers of block `index`."""
        prefix = self.blocks[index] + "."
        return [name for name in self.linears if name.startswith(prefix)]

    def shape(self, linear: str) -> tuple[int, int]:
        """Rows (outputs) and columns (inputs) of a linear layer's weight."""
        module = self.model.get_submodule(linear)
        assert isinstance(module, nn.Linear), linear
        return module.out_features, module.in_features

    def classes(self) -> dict[str, str]:
        """Module name -> class name of every linear layer and embedding."""
        kinds = (nn.Linear, nn.Embedding)
        return {name: type(module).__name__ for name, module in self.model.named_modules() if isinstance(module, kinds)}

    def embedding(self) -> tuple[str, nn.Embedding]:
        """Name and module of the input embedding."""
        module = self.model.get_input_embeddings()  # type: ignore[operator]
        assert isinstance(module, nn.Embedding)
        return next(name for name, other in self.model.named_modules() if other is module), module

    def output_name(self) -> str:
        """Name of the output layer; empty where the model has none."""
        module = self.model.get_output_embeddings()  # type: ignore[operator]
        return next((name for name, other in self.model.named_modules() if other is module), "")

    @property
    def tied(self) -> bool:
        """Whether the output layer's weight is the input embedding."""
        return bool(self.output_name() and getattr(self.config, "tie_word_embeddings", False))

    @property
    def dimensions(self) -> Dimensions:
        return dimensions(self.config)

    def outside(self, name: str) -> bool:
        """Whether a module or tensor lies outside the blocks."""
        return not any(name.startswith(block + ".") for block in self.blocks)

    def front_parameters(self) -> list[str]:
        """Names of all parameters that the way to the first block may need: those outside the blocks but the head's.

        Embeddings of tokens and positions, and what scales or projects them. Final norms are among them too, since no
        rule tells them from norms in front; they are small.
        """
        head = self.output_name() + "."
        return [
            name
            for name, _ in self.model.named_parameters(remove_duplicate=False)
            if self.outside(name) and not name.startswith(head)
        ]

    @property
    def family(self) -> Family | None:
        return FAMILIES.get(self.config.model_type)


def build_skeleton(folder: Path) -> Skeleton:
    """The skeleton of the model in `folder`, from its config.json alone.

    Raises InputError for an architecture that transformers does not know or that has no row of decoder blocks.
    """
    model = empty_model(folder)
    config = model.config
    config.use_cache = False
    blocks = _find_blocks(model, config)
    if not blocks:
        raise InputError(f"{folder / 'config.json'}: model_type {config.model_type!r} has no list of decoder blocks")
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return Skeleton(model, config, blocks, linears)


def _find_blocks(model: nn.Module, config: Any) -> list[str]:
    """Names of the children of the outermost ModuleList that is as long as the model is deep."""
    depth = getattr(config.get_text_config(), "num_hidden_layers", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return [f"{name}.{index}" for index in range(len(module))]
    return []


def input_groups(linears: list[str]) -> list[tuple[str, ...]]:
    """Linear layers grouped by shared input, in order: q/k/v and gate/up together, every other layer alone."""
    groups: list[tuple[str, ...]] = []
    placed: set[str] = set()
    for name in linears:
        if name in placed:
            continue
        leaf = name.rpartition(".")[2]
        parent = name.removesuffix(leaf)
        family = next((siblings for siblings in SIBLINGS if leaf in siblings), (leaf,))
        group = tuple(parent + other for other in family if parent + other in linears)
        groups.append(group)
        placed.update(group)
    return groups


def pairs(skeleton: Skeleton, index: int) -> list[Pair]:
    """The pairs of block `index` between which a scale can move without changing the model's function.

    Raises InputError for a family whose pairs are not in the table.
    """
    family = skeleton.family
    if family is None:
        known = ", ".join(FAMILIES)
        raise InputError(
            f"transform: model_type {skeleton.config.model_type!r} has no table of norm and linear pairs "
            f"(known: {known}): leave the transform stage out"
        )
    config, block = skeleton.config, skeleton.blocks[index]
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = tuple(f"{block}.self_attn.{name}" for name in SIBLINGS[0])
    mlp = tuple(f"{block}.mlp.{name}" for name in SIBLINGS[1])
    repeat = config.num_attention_heads // config.num_key_value_heads
    return [
        Pair(f"{block}.input_layernorm", attention, "norm", family.norm_offset),
        Pair(attention[2], (f"{block}.self_attn.o_proj",), "linear", repeat=repeat, head_size=head_size),
        Pair(f"{block}.{family.mlp_norm}", mlp, "norm", family.norm_offset),
        Pair(mlp[1], (f"{block}.mlp.down_proj",), "linear", gates=mlp[:1]),
    ]


@contextmanager
def materialized(module: nn.Module, tensors: dict[str, Tensor], strict: bool = True) -> Iterator[nn.Module]:
    """`module` with its parameters set to `tensors` (names relative to it); back on the meta device afterwards.

    strict: all of its parameters must be given, not only those that are needed.
    """
    try:
        module.load_state_dict(tensors, strict=strict, assign=True)
        yield module
    finally:
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    owner._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
