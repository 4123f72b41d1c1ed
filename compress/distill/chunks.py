"""The mean loss over positions without the logits of all of them: chunk by chunk, gradients taken on the way.

Logits of 2048 positions and 49,152 tokens are 403 MB in float32, and a divergence holds half a dozen such tensors until
its backward pass. Here the backward pass of a chunk runs as soon as its loss is known, and what it leaves is small: the
gradients of the hidden states and of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from compress.errors import InputError

Head = Callable[[Tensor], Tensor]
Score = Callable[[Tensor, Tensor], Tensor]


def chunked_mean(
    hidden: Tensor, head: Head, parameters: Sequence[Tensor], score: Score, weights: Tensor, rows: int = 256
) -> Tensor:
    """sum_i weights_i * score_i / sum_i weights_i, a scalar in float32 or better; one node of the graph.

    hidden: [n, D]. head: hidden [m, D] -> logits [m, V], for m of at most `rows`. parameters: the tensors that `head`
    uses; those that require no gradient are held. score: (logits [m, V], index int64 [m]) -> [m], where `index` says
    which of the n positions they are. weights: [n]; positions of weight 0 never get logits.

    The gradients of `hidden` and `parameters` are summed here in float32 or better and kept for the backward pass,
    which runs once and has no derivative; without gradient mode there are none. A parameter that is named twice counts
    once. InputError where no position has a weight.
    """
    positions = weights.detach().nonzero().squeeze(1)
    if not len(positions):
        raise InputError("weights: no position of this batch has one: leave such sequences out")
    shares = weights.detach()[positions].to(_wide(hidden))
    shares = shares / shares.sum()
    differentiable = [tensor for tensor in (hidden, *parameters) if tensor.requires_grad and torch.is_grad_enabled()]
    tensors = list({id(tensor): tensor for tensor in differentiable}.values())
    kept = [torch.zeros_like(tensor, dtype=_wide(tensor)) for tensor in tensors]
    total = shares.new_zeros(())
    for index, share in zip(positions.split(rows), shares.split(rows), strict=True):
        chunk = hidden.detach()[index].requires_grad_(hidden.requires_grad)
        scores = score(head(chunk), index)
        if scores.shape != share.shape:
            raise ValueError(f"{len(index)} positions got scores of shape {tuple(scores.shape)}")
        part = (scores * share).sum()
        total += part.detach()
        leaves = [chunk if tensor is hidden else tensor for tensor in tensors]
        gradients = torch.autograd.grad(part, leaves) if leaves else ()
        for leaf, tally, gradient in zip(leaves, kept, gradients, strict=True):
            if leaf is chunk:
                tally[index] = gradient.to(tally.dtype)
            else:
                tally += gradient
    if not tensors:
        return total
    return _Known.apply(total, [tally.to(tensor.dtype) for tally, tensor in zip(kept, tensors, strict=True)], *tensors)


class _Known(torch.autograd.Function):
    """A value whose gradients are known already."""

    @staticmethod
    def forward(context: Any, value: Tensor, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        context.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(context: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(gradient * upstream.to(gradient.dtype) for gradient in context.saved_tensors)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
