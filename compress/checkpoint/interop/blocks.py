"""GGUF's blocks of 32 weights, Q4_0 and Q8_0: rounded to from floats, or filled with integers that are there already.

A block is a float16 scale d and 32 codes. Q4_0: 16 bytes, byte i holds codes i (low) and i + 16 (high), weight
d * (code - 8). Q8_0: 32 signed bytes, weight d * code. Rounding follows ggml's reference (quantize_row_q4_0_ref,
quantize_row_q8_0_ref) step by step in float32, so that the bytes are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.formats.grid import Quantized

BLOCK = 32
SCALE_BYTES = 2
# GGUF type -> bits of the signed integers that it holds.
BITS = {"Q4_0": 4, "Q8_0": 8}


def round_to(kind: str, weight: Tensor) -> Tensor:
    """float32 [N, K] -> uint8 [N, bytes per row] of type `kind`, K a multiple of 32.

    Raises ValueError for NaN, infinity or a magnitude whose scale float16 cannot hold.
    """
    blocks = weight.view(-1, BLOCK)
    codes, scale = (_round_q4_0 if kind == "Q4_0" else _round_q8_0)(blocks)
    stored = scale.half()
    if not bool(torch.isfinite(stored).all()):
        raise ValueError("holds NaN, infinity or a value beyond the range of float16 scales")
    return _join(kind, codes, stored).view(weight.shape[0], -1)


def carries(kind: str, quantized_bits: int, per_scale: int, plain: bool) -> bool:
    """Whether blocks of `kind` hold integers of so many bits, `per_scale` of which share a scale, as they are.

    plain: they are symmetric and no column is kept in 16 bit.
    """
    return plain and BITS.get(kind) == quantized_bits and per_scale % BLOCK == 0


def carry(kind: str, quantized: Quantized) -> tuple[Tensor, Tensor]:
    """Symmetric integers [N, K] into blocks, unchanged; returns uint8 [N, bytes per row] and the float16 scales [N, G].

    Each block of a group gets the group's scale. Raises ValueError for a scale beyond float16.
    """
    rows, columns = quantized.q.shape
    scale = quantized.scale.half()
    if not bool(torch.isfinite(scale).all()):
        raise ValueError("holds a scale beyond the range of float16")
    shared = columns // scale.shape[1] // BLOCK
    codes = quantized.q.view(-1, BLOCK)
    if kind == "Q4_0":
        codes = (codes + 8).view(torch.uint8)
    return _join(kind, codes, scale.repeat_interleave(shared, dim=1).view(-1, 1)).view(rows, -1), scale


def _round_q4_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 and scales float32 [B, 1]: the value of largest magnitude, sign included, becomes code 0."""
    extreme = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
    scale = extreme / -8
    codes = (blocks * _inverse(scale) + 8.5).trunc().clamp(0, 15)
    return codes.to(torch.uint8), scale


def _round_q8_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 and scales float32 [B, 1]; halves are rounded away from zero."""
    scale = blocks.abs().amax(dim=1, keepdim=True) / 127
    scaled = blocks * _inverse(scale)
    magnitude = scaled.abs()
    whole = magnitude.floor()
    return (scaled.sign() * (whole + (2 * (magnitude - whole)).floor())).to(torch.int8), scale


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _join(kind: str, codes: Tensor, scale: Tensor) -> Tensor:
    """uint8 [B, bytes per block] of codes [B, 32] and float16 scales [B, 1]."""
    if kind == "Q4_0":
        codes = codes[:, : BLOCK // 2] | (codes[:, BLOCK // 2 :] << 4)
    return torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)], dim=1)
