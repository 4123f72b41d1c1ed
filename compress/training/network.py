"""A causal language model in training form: hidden states of every layer, and logits of chosen positions alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from compress.checkpoint import Checkpoint, open_checkpoint
from compress.checkpoint.quantization_config import stored_schemes
from compress.checkpoint.source import dequantized
from compress.formats.scheme import Scheme
from compress.model import build_skeleton
from compress.runtime import transformers_engine
from compress.runtime.assign import Target, assign
from compress.runtime.transformers_engine import TransformersNetwork


class Network(nn.Module):
    """A model of transformers between its tokens and its logits, without a cache of keys and values.

    It stays in evaluation mode, so that dropout, which no teacher had, does not blur what the student is told.
    block_names: of the decoder blocks, in order. vocabulary: rows of the output layer; layers: blocks; width: of the
    hidden states. checkpointing: blocks keep their input alone and run again on the way back. (Not through the switch
    of transformers, which works in training mode only.)
    """

    def __init__(self, engine: TransformersNetwork, block_names: Sequence[str], checkpointing: bool = False) -> None:
        super().__init__()
        self.engine = engine
        self.block_names = tuple(block_names)
        self.vocabulary = int(self._head().weight.shape[0])
        self.layers = len(self.block_names)
        self.width = int(engine.model.config.get_text_config().hidden_size)
        for block in self.blocks if checkpointing else []:
            # Without dropout there is no state of a random generator to bring back.
            block.forward = partial(recompute, block.forward, use_reentrant=False, preserve_rng_state=False)
        self.eval()

    @property
    def model(self) -> Any:
        """The model of transformers."""
        return self.engine.model

    @property
    def blocks(self) -> list[nn.Module]:
        return [self.model.get_submodule(name) for name in self.block_names]

    def hidden(self, ids: Tensor, every: bool = False) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Hidden states of tokens [B, T]: [B, T, D] after the final norm; and, if `every`, those before the first block
        and behind each block, all in front of the final norm: layers + 1 of [B, T, D].
        """
        if not every:
            return self.engine.hidden(ids), ()
        states: list[Tensor] = []

        def enters(_module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            states.append(given[0] if given else named["hidden_states"])

        def leaves(_module: nn.Module, _given: tuple[Any, ...], result: Any) -> None:
            states.append(result[0] if isinstance(result, tuple) else result)

        hooks = [self.blocks[0].register_forward_pre_hook(enters, with_kwargs=True)]
        hooks += [block.register_forward_hook(leaves) for block in self.blocks]
        try:
            last = self.engine.hidden(ids)
        finally:
            for hook in hooks:
                hook.remove()
        return last, tuple(states)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of hidden states [n, D], scaled and capped as the architecture does."""
        return self.engine.logits(hidden)

    def head_parameters(self) -> list[nn.Parameter]:
        """The parameters that `logits` uses."""
        return list(self._head().parameters())

    def _head(self) -> Any:
        return self.engine.model.get_output_embeddings()


def load_network(folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> Network:
    """The model in `folder`, nothing of which learns; a compressed one as the float weights it stands for.

    Raises InputError for a checkpoint that is damaged, not understood or not complete.
    """
    checkpoint = open_checkpoint(Path(folder))
    skeleton = build_skeleton(checkpoint.folder)
    if checkpoint.quantization is None:
        engine, _ = transformers_engine.build(checkpoint, Target(device, dtype))
    else:
        fill(skeleton.model, checkpoint, stored_schemes(checkpoint), Target(device, dtype))
        engine = TransformersNetwork(skeleton.model)
    return Network(engine, skeleton.blocks).requires_grad_(False)


def fill(model: nn.Module, checkpoint: Checkpoint, schemes: Mapping[str, Scheme], target: Target) -> None:
    """Give every parameter of `model` (on meta) its tensor, packed ones as the floats that they stand for.

    Tied names share one parameter, so that it gets the gradients of all, unless the checkpoint stores different values.
    Raises InputError for a checkpoint that does not hold this very model.
    """
    floats = dequantized(checkpoint, dict(schemes), target.dtype)
    # What `assign` asks of a checkpoint, its float view answers too.
    assign(model, cast(Checkpoint, floats), {}, target)
    one_of: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, one_of.setdefault(parameter.data_ptr(), parameter))
    model.to(target.device)  # computed tables
