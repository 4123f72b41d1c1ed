"""Which layers pruning hurts most: the model's KL divergence from itself with just one group of layers pruned.

Masks are Wanda's (arXiv 2306.11695), which take one pass over the tokens for all layers; nothing is made up for, so
that divergences are larger than those of a solver, and only their order is used. The whole model is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from compress.assignment import Assignment
from compress.formats.pattern import Pattern, keep_largest
from compress.model import input_groups
from compress.runtime.load import Execution, Model, load_model

# Calibration tokens that the divergences are measured on, and rows of logits that exist at a time.
TOKENS = 2048
ROWS = 256

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Sensitivity:
    """Layers that share their input, and the mean KL divergence per token, nats, when they alone are pruned."""

    layers: tuple[str, ...]
    kl: float


def measure(
    folder: Path, assignment: Assignment, ids: Tensor, device: torch.device, progress: Progress
) -> list[Sensitivity]:
    """The sensitivity of every group of layers that `assignment` prunes and may leave dense, most sensitive first.

    folder: the float model. ids: calibration tokens [samples, seqlen], of which the first TOKENS are used.
    """
    model = load_model(folder, device, execution=Execution("reference"))
    ids = ids[: max(1, TOKENS // ids.shape[1])].to(device)
    groups = [group for group in input_groups(list(assignment.layers)) if share_of(assignment, group)]
    squares, exact = _inputs(model, groups, ids)
    found = []
    for done, group in enumerate(groups):
        progress(done, len(groups))
        pattern = assignment.layers[group[0]].scheme.pattern
        assert pattern is not None, "only pruned layers have a share"
        with _pruned(model, group, squares[group].sqrt(), pattern):
            found.append(Sensitivity(group, _divergence(model, exact, model.hidden(ids).flatten(0, 1))))
    progress(len(groups), len(groups))
    return sorted(found, key=lambda one: (-one.kl, one.layers))


def share_of(assignment: Assignment, group: Sequence[str]) -> float:
    """The share of its layers that the stage which prunes `group` leaves dense; 0 where none does."""
    prune = assignment.layers[group[0]].prune
    return 0.0 if prune is None else prune.keep_dense


def most_sensitive(found: Sequence[Sensitivity], assignment: Assignment) -> dict[str, float]:
    """The layers to be left dense, with their group's divergence: of every prune stage the share that it asks for.

    Shares count groups of layers that share their input, and are rounded up.
    """
    dense: dict[str, float] = {}
    for stage in dict.fromkeys(task.prune.where for task in assignment.layers.values() if task.prune is not None):
        mine = [one for one in found if (prune := assignment.layers[one.layers[0]].prune) and prune.where == stage]
        share = share_of(assignment, mine[0].layers) if mine else 0.0
        for one in mine[: math.ceil(share * len(mine) - 1e-9)]:
            dense |= dict.fromkeys(one.layers, one.kl)
    return dense


def _inputs(model: Model, groups: list[tuple[str, ...]], ids: Tensor) -> tuple[dict[tuple[str, ...], Tensor], Tensor]:
    """The mean square of each group's inputs [K], and the hidden states [tokens, D] of the unpruned model."""
    squares: dict[tuple[str, ...], Tensor] = {}

    def remember(group: tuple[str, ...]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def take(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            squares[group] = inputs[0].flatten(0, -2).float().square().mean(0)

        return take

    with ExitStack() as undo:
        for group in groups:
            undo.callback(_linear(model, group[0]).register_forward_pre_hook(remember(group)).remove)
        exact = model.hidden(ids).flatten(0, 1)
    return squares, exact


@contextmanager
def _pruned(model: Model, group: Sequence[str], sizes: Tensor, pattern: Pattern) -> Iterator[None]:
    """The model with the layers of `group` pruned by their weights times the `sizes` [K] of their inputs."""
    linears = [_linear(model, name) for name in group]
    before = [linear.weight.data for linear in linears]
    for linear in linears:
        linear.weight.data = linear.weight.data * keep_largest(linear.weight.data.abs() * sizes, pattern)
    try:
        yield
    finally:
        for linear, weight in zip(linears, before, strict=True):
            linear.weight.data = weight


def _linear(model: Model, name: str) -> nn.Linear:
    """The linear layer that a checkpoint calls `name`; transformers' own models lie one module deeper."""
    network = model.network
    assert isinstance(network, nn.Module), "both engines are modules"
    found = next(module for path, module in network.named_modules() if path == name or path.endswith(f".{name}"))
    assert isinstance(found, nn.Linear), name
    return found


def _divergence(model: Model, exact: Tensor, hidden: Tensor) -> float:
    """Mean KL divergence of the next-token distributions behind two sets of hidden states [tokens, D], nats."""
    total = 0.0
    for start in range(0, len(exact), ROWS):
        want = model.logits(exact[start : start + ROWS]).float().log_softmax(-1)
        got = model.logits(hidden[start : start + ROWS]).float().log_softmax(-1)
        total += float((want.exp() * (want - got)).sum())
    return total / len(exact)
