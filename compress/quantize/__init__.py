"""Quantization algorithms: which integers a weight becomes. One file each."""

from __future__ import annotations

from dataclasses import dataclass

from compress.formats.grid import Quantized


@dataclass(frozen=True)
class Solved:
    """A quantized weight and what the algorithm has to say about it.

    damping: the share of the mean Hessian diagonal that was added to it, where a Hessian was inverted. fallback: why
    something else than the method asked for was done, None when it was not.
    """

    quantized: Quantized
    damping: float | None = None
    fallback: str | None = None
