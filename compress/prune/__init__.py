"""Pruning: which weights of every few columns are kept, and what becomes of them. One file per method."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Pruned:
    """A pruned weight float32 [N, K], zero outside of its mask bool [N, K].

    damping and fallback: as a quantizer's `Solved` says them.
    """

    weight: Tensor
    mask: Tensor
    damping: float | None = None
    fallback: str | None = None
