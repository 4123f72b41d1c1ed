"""The walk's passes over calibration tokens: embed once, then per block collect statistics and propagate.

A block's arguments other than its hidden states (masks, position embeddings) are captured from the model itself and
replayed, never rebuilt: they differ between architectures and between releases of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.activations import ActivationBuffer
from compress.checkpoint.source import Source
from compress.model import Skeleton, materialized
from compress.stats import InputStats, StatsAccumulator

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Group = tuple[str, ...]


class _Enough(Exception):
    """Ends a forward pass whose remainder nobody needs."""


@dataclass(frozen=True)
class Calibration:
    """Hidden states (float32) in front of the current block, every block's other arguments by batch size, and the
    dtype that matrix products multiply in (`arithmetic`)."""

    hidden: ActivationBuffer
    arguments: dict[int, list[Inputs]]
    arithmetic: torch.dtype = torch.float32

    def run(self, block: nn.Module, index: int, batch: int, device: torch.device) -> Tensor:
        """The output of `block`, number `index`, on batch number `batch`."""
        hidden = self.hidden[batch].to(device)
        positional, keyword = self.arguments[len(hidden)][index]
        with torch.autocast(device.type, torch.bfloat16, enabled=self.arithmetic == torch.bfloat16):
            output = block(hidden, *_to(positional, device), **_to(keyword, device))
        return (output[0] if isinstance(output, tuple) else output).float()


def arithmetic(device: torch.device) -> torch.dtype:
    """What matrix products of a calibration pass multiply in: bfloat16, summed in float32, where `device` has units
    for it (a GPU, AVX-512 BF16, AMX), float32 elsewhere. Hidden states between blocks and Hessians are float32."""
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        fast = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    else:
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if fast else torch.float32


def embed(
    skeleton: Skeleton, tokens: Tensor, batch_size: int, buffer: ActivationBuffer, dtype: torch.dtype = torch.float32
) -> Calibration:
    """Run `tokens` [samples, seqlen] up to the first block, in batches of `batch_size` sequences.

    The embedding must be materialized; the blocks are replaced by recorders while this runs. It may be in 16 bit: what
    leaves it is float32, as everything behind it. dtype: what the passes over the blocks shall multiply in.
    """
    arguments: dict[int, list[Inputs]] = {}
    recorded: list[Inputs] = []
    first: list[Tensor] = []
    last = len(skeleton.blocks) - 1

    def recorder(index: int) -> Callable[..., Tensor]:
        def record(hidden_states: Tensor, *positional: Any, **keyword: Any) -> Tensor:
            recorded.append((positional, keyword))
            if index == 0:
                first.append(hidden_states)
            if index == last:
                raise _Enough
            return hidden_states

        return record

    with torch.no_grad(), ExitStack() as undo:
        undo.callback(skeleton.embedding()[1].register_forward_hook(lambda *call: call[2].float()).remove)
        for index in range(len(skeleton.blocks)):
            block = skeleton.block(index)
            block.forward = recorder(index)
            undo.callback(block.__dict__.pop, "forward")
        for start in range(0, len(tokens), batch_size):
            ids = tokens[start : start + batch_size]
            recorded.clear()
            first.clear()
            with suppress(_Enough):
                skeleton.model(input_ids=ids, use_cache=False)
            buffer.append(first[0])
            arguments.setdefault(len(ids), list(recorded))
    return Calibration(buffer, arguments, dtype)


def embed_from(
    source: Source,
    skeleton: Skeleton,
    tokens: Tensor,
    batch_size: int,
    buffer: ActivationBuffer,
    dtype: torch.dtype = torch.float32,
) -> Calibration:
    """`embed` of the model in `source`, of which only what may lie in front of the first block is in memory meanwhile.

    Only the token table, by far the largest, stays in its stored dtype; what leaves it is float32.
    """
    table = f"{skeleton.embedding()[0]}.weight"
    weights = {name: source.read(name) for name in skeleton.front_parameters()}
    weights = {name: weight if name == table else weight.float() for name, weight in weights.items()}
    with materialized(skeleton.model, weights, strict=False):
        return embed(skeleton, tokens, batch_size, buffer, dtype)


def block_weights(source: Source, skeleton: Skeleton, index: int, device: torch.device) -> dict[str, Tensor]:
    """The float32 parameters of block `index`, by name within it."""
    prefix = f"{skeleton.blocks[index]}."
    names = [name for name, _ in skeleton.block(index).named_parameters()]
    return {name: source.read(prefix + name).to(device, torch.float32) for name in names}


def collect(
    skeleton: Skeleton, index: int, calibration: Calibration, needs: Mapping[Group, tuple[frozenset[str], float | None]]
) -> dict[Group, InputStats]:
    """Statistics of the inputs of each group of linear layers in block `index`, which must be materialized.

    needs: per group the statistics asked for and the outlier threshold. In a known family the pass ends when the last
    group has its input: what follows would be computed for nothing.
    """
    wanted = {group: need for group, need in needs.items() if need[0]}
    if not wanted:
        return {}
    accumulators = {group: StatsAccumulator(", ".join(group), *need) for group, need in wanted.items()}
    block = skeleton.block(index)
    device = next(block.parameters()).device
    order: list[Group] = []

    def hook(group: Group) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def take(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            accumulators[group].add(inputs[0])
            if group not in order:
                order.append(group)
            if skeleton.family is not None and len(order) == len(accumulators) and group == order[-1]:
                raise _Enough

        return take

    with torch.no_grad(), ExitStack() as undo:
        for group in accumulators:
            handle = skeleton.model.get_submodule(group[0]).register_forward_pre_hook(hook(group))
            undo.callback(handle.remove)
        for batch in range(len(calibration.hidden)):
            with suppress(_Enough):
                calibration.run(block, index, batch, device)
    return {group: accumulator.result() for group, accumulator in accumulators.items()}


def propagate(
    skeleton: Skeleton, index: int, calibration: Calibration, activation_rules: Mapping[str, Callable[[Tensor], Tensor]]
) -> None:
    """Replace the hidden states by the output of block `index` (materialized with its compressed weights).

    activation_rules: for layers that quantize their inputs at run time, what happens to the input.
    """
    block = skeleton.block(index)
    device = next(block.parameters()).device
    with torch.no_grad(), ExitStack() as undo:
        for name, rule in activation_rules.items():
            handle = skeleton.model.get_submodule(name).register_forward_pre_hook(_rewrite_input(rule))
            undo.callback(handle.remove)
        for batch in range(len(calibration.hidden)):
            calibration.hidden.replace(batch, calibration.run(block, index, batch, device))


def _rewrite_input(rule: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    return lambda _, inputs: (rule(inputs[0]), *inputs[1:])


def _to(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in its tuples, lists and dictionaries moved to `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to(item, device) for item in value)
    return value
