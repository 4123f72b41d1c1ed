"""Importance of layers, channels and heads: one pass over calibration tokens, one block in memory at a time.

A block's influence is 1 - cosine of its input and output, the mean over tokens (ShortGPT, arXiv 2403.03853, section
3). A channel's is the size of its activation in front of the MLP's down projection, a head's the norm of its output in
front of the output projection (Minitron, arXiv 2407.14679, section 2.2); each as a root mean square and as a mean.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from compress.activations import ActivationBuffer
from compress.calibrate import Calibration, arithmetic, block_weights, embed_from, propagate
from compress.checkpoint.source import Source
from compress.errors import InputError
from compress.model import Skeleton, materialized
from compress.plan import ACTIVATION_BUDGET, TOKENS_PER_BATCH
from compress.shrink import BLOCK_INFLUENCE

Progress = Callable[[int, int], None]


def embedded(source: Source, skeleton: Skeleton, ids: Tensor, work: Path, device: torch.device) -> Calibration:
    """Hidden states of `ids` int64 [S, T] in front of the first block; what is beyond a budget is kept in `work`."""
    buffer, batch = ActivationBuffer(ACTIVATION_BUDGET, work), max(1, TOKENS_PER_BATCH // ids.shape[1])
    return embed_from(source, skeleton, ids, batch, buffer, arithmetic(device))


def measure(
    source: Source,
    skeleton: Skeleton,
    calibration: Calibration,
    wanted: frozenset[str],
    device: torch.device,
    progress: Progress,
) -> dict[str, Tensor]:
    """The importances `wanted` (names of `shrink.MEASURED`), float64 [blocks] or [blocks, units], on the CPU.

    Moves the hidden states of `calibration` to the end of the blocks. progress(done, total) is told after each block.
    Raises InputError where a block gives values that are not finite.
    """
    rows: dict[str, list[Tensor]] = {name: [] for name in wanted}
    for index, name in enumerate(skeleton.blocks):
        with materialized(skeleton.block(index), block_weights(source, skeleton, index, device)):
            for kind, values in _measure_block(skeleton, index, calibration, wanted).items():
                if not bool(values.isfinite().all()):
                    raise InputError(f"{source.folder}: {name} gives values that are not finite: check its weights")
                rows[kind].append(values)
        progress(index + 1, len(skeleton.blocks))
    return {name: torch.stack(values) for name, values in rows.items()}


def _measure_block(
    skeleton: Skeleton, index: int, calibration: Calibration, wanted: frozenset[str]
) -> dict[str, Tensor]:
    """The importances `wanted` of one materialized block, which is run once over all hidden states."""
    block, name = skeleton.block(index), skeleton.blocks[index]
    sums: dict[str, Tensor] = {}
    tokens = sum(calibration.hidden[batch].shape[:2].numel() for batch in range(len(calibration.hidden)))

    def add(kind: str, values: Tensor) -> None:
        if kind in wanted:
            total = values.double().sum(0).cpu()
            sums[kind] = sums[kind] + total if kind in sums else total

    def passed(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        after = output[0] if isinstance(output, tuple) else output
        cosine = cosine_similarity(inputs[0].flatten(0, 1).double(), after.flatten(0, 1).double(), dim=-1)
        add(BLOCK_INFLUENCE, 1 - cosine)

    def channels(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        size = inputs[0].flatten(0, 1).float().abs()
        add("channel_mean", size)
        add("channel_l2", size.square())

    def heads(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        size = inputs[0].flatten(0, 1).float().unflatten(-1, (-1, skeleton.dimensions.head_dim)).norm(dim=-1)
        add("head_mean", size)
        add("head_l2", size.square())

    with ExitStack() as undo:
        undo.callback(block.register_forward_hook(passed).remove)
        if wanted & {"channel_mean", "channel_l2"}:
            down = skeleton.model.get_submodule(f"{name}.mlp.down_proj")
            undo.callback(down.register_forward_pre_hook(channels).remove)
        if wanted & {"head_mean", "head_l2"}:
            out = skeleton.model.get_submodule(f"{name}.self_attn.o_proj")
            undo.callback(out.register_forward_pre_hook(heads).remove)
        propagate(skeleton, index, calibration, {})
    means = {kind: total / tokens for kind, total in sums.items()}
    return {kind: mean.sqrt() if kind.endswith("_l2") else mean for kind, mean in means.items()}
