"""Sequences: what a student is trained on, how its batches are drawn, and what is held out of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.errors import USAGE, InputError


@dataclass(frozen=True)
class Sequences:
    """Token sequences, right-padded, and how much each of their predictions counts.

    ids: int64 [N, T]. weights: float32 [N, T], of predicting ids[:, t + 1] at position t; the last column is 0.
    sha256: of both. description: plain values for the manifest, among them `notes`. group: that many rows in a row
    belong together, and stay so in batches and in what is held out.
    """

    ids: Tensor
    weights: Tensor
    sha256: str
    description: dict[str, Any]
    group: int = 1


def bundle(ids: Tensor, weights: Tensor, description: dict[str, Any], group: int = 1) -> Sequences:
    """Sequences of ids [N, T] and weights [N, T], with their sha256 and sizes in the description."""
    digest = hashlib.sha256(ids.contiguous().numpy().astype("<i8").tobytes())
    digest.update(weights.contiguous().numpy().astype("<f4").tobytes())
    sizes = {
        "sequences": len(ids),
        "seqlen": ids.shape[1],
        "tokens": ids.numel(),
        "weighed": int((weights > 0).sum()),
        "sha256": digest.hexdigest(),
    }
    return Sequences(ids, weights, digest.hexdigest(), description | sizes, group)


def padded(rows: Sequence[tuple[Sequence[int], Sequence[float]]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and weights [N, T] of `rows`, each its tokens and how much each of them counts, `pad` behind shorter ones.

    How much a token counts becomes the weight of the position before it, from which it is predicted. The first token
    of a row is predicted from nowhere.
    """
    length = max(len(tokens) for tokens, _ in rows)
    ids = torch.full((len(rows), length), pad, dtype=torch.int64)
    weights = torch.zeros(len(rows), length)
    for row, (tokens, counts) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        weights[row, : len(tokens) - 1] = torch.tensor(counts[1:])
    return ids, weights


def pad_token(tokenizer: Any) -> int:
    """What stands behind a sequence that is shorter than others: it counts nowhere, so any token serves."""
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in known if token is not None)


def rows_of(step: int, batch: int, count: int, seed: int, group: int = 1) -> Tensor:
    """Rows int64 [batch] of batch `step` out of `count`: a function of its arguments alone, so resuming needs no state.

    Every epoch is a permutation of its own, of groups of `group` rows, whose rows follow one another. Batches run on
    across the ends of epochs. `count` is a multiple of `group`; a batch that is not is an InputError.
    """
    if batch % group:
        raise InputError(
            f"training.batch: is {batch}, and {group} sequences belong together: give a multiple of {group}", USAGE
        )
    places = range(step * batch, (step + 1) * batch)
    orders = {epoch: _order(count // group, seed, epoch) for epoch in {place // count for place in places}}
    return torch.tensor([orders[p // count][p % count // group] * group + p % group for p in places])


def _order(count: int, seed: int, epoch: int) -> list[int]:
    # A large odd stride, so that neighbouring seeds do not share their epochs.
    generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + epoch) % (1 << 63))
    return torch.randperm(count, generator=generator).tolist()


def held_last(sequences: Sequences, held_out: int) -> Sequences:
    """`sequences` with `held_out` groups, evenly spaced so that they stand for the whole, moved behind all others.

    Raises InputError where nothing would be left to train on.
    """
    groups = len(sequences.ids) // sequences.group
    if groups <= held_out:
        mend = f"give more text, or set it to {groups - 1} or less" if groups > 1 else "give more text"
        raise InputError(f"data.held_out: is {held_out}, and there are {groups} sequences in all: {mend}", USAGE)
    held = [(2 * i + 1) * groups // (2 * held_out) for i in range(held_out)]
    return _part(sequences, [*(group for group in range(groups) if group not in set(held)), *held])


def split(sequences: Sequences, held_out: int) -> tuple[Sequences, Sequences]:
    """What is trained on, and the last `held_out` groups of rows, which are not."""
    groups = len(sequences.ids) // sequences.group
    border = groups - held_out
    return _part(sequences, range(border)), _part(sequences, range(border, groups))


def _part(sequences: Sequences, groups: Iterable[int]) -> Sequences:
    rows = torch.tensor([group * sequences.group + i for group in groups for i in range(sequences.group)])
    return bundle(sequences.ids[rows], sequences.weights[rows], sequences.description, sequences.group)
