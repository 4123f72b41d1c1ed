"""Weights as the C++ kernels want them: panels of 16 output rows side by side (source/weights.h draws the layout).

N rows and K columns, both padded with zeros: N to a multiple of 16, K to a multiple of 8, or of 32 with 2:4 sparsity.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LANES = 16
COLUMNS = 8  # what K is padded to
BLOCK = 32  # what K of 2:4 weights is padded to


def nibble_panels(q: Tensor) -> Tensor:
    """Signed 4-bit integers, int8 [N, K], as uint8 [panels, K / 8, 16, 4]: of 8 columns the first 4 in low halves."""
    q = _padded(q, COLUMNS)
    unsigned = (q + 8).to(torch.uint8).view(-1, LANES, q.shape[1] // COLUMNS, 2, COLUMNS // 2)
    return (unsigned[..., 0, :] | unsigned[..., 1, :] << 4).transpose(1, 2).contiguous()


def byte_panels(q: Tensor) -> Tensor:
    """Signed 8-bit integers, int8 [N, K], as uint8 [panels, K / 4, 16, 4], 128 added."""
    q = _padded(q, COLUMNS)
    unsigned = (q.view(torch.uint8) ^ 128).view(-1, LANES, q.shape[1] // 4, 4)
    return unsigned.transpose(1, 2).contiguous()


def sparse_panels(q: Tensor, mask: Tensor, bits: int) -> Tensor:
    """2:4 weights of 4 or 8 bits, int8 and bool [N, K], as uint8 [panels, K / 32, 1 + bits / 2, 16, 4].

    A block of 32 columns holds the positions of its kept values, then the values.
    """
    positions = kept_positions(_padded(mask, BLOCK))
    values = _padded(q, BLOCK).unflatten(1, (-1, 4)).gather(-1, positions)
    shape = (-1, LANES, positions.shape[1] * 4 // BLOCK, 4, 4)
    # [panels, K / 32, unit of 8 columns, 16, kept value]
    positions, values = (part.to(torch.uint8).view(shape).permute(0, 2, 3, 1, 4) for part in (positions, values))
    packed = positions[:, :, 0] | positions[:, :, 1] << 2 | positions[:, :, 2] << 4 | positions[:, :, 3] << 6
    if bits == 4:
        values = values[:, :, 0::2] & 15 | values[:, :, 1::2] << 4
    return torch.cat((packed.unsqueeze(2), values), dim=2)


def kept_positions(mask: Tensor) -> Tensor:
    """Where a 2:4 mask bool [N, K] keeps: int64 [N, K / 4, 2], within four columns. Where it keeps none: 0 and 3."""
    groups = mask.to(torch.uint8).unflatten(1, (-1, 4))
    # Of equal numbers, argmax finds the first.
    return torch.stack((groups.argmax(-1), 3 - groups.flip(-1).argmax(-1)), dim=-1)


def column_panels(values: Tensor) -> Tensor:
    """Any dtype [N, C] as [panels, C, 16]: dense weights, scales per group, zero points, outlier columns."""
    values = _padded(values, 1)
    return values.view(len(values) // LANES, LANES, values.shape[1]).transpose(1, 2).contiguous()


def pair_panels(weight: Tensor) -> Tensor:
    """bfloat16 [N, K] as [panels, K / 2, 16, 2]: the two columns of a row beside each other."""
    weight = _padded(weight, COLUMNS)
    return weight.view(-1, LANES, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()


def narrowest(weight: Tensor) -> Tensor:
    """`weight` in the first of bfloat16, float16 and float32 that holds every value exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = weight.to(dtype)
        if torch.equal(narrow.to(weight.dtype), weight):
            return narrow
    return weight.float()


def _padded(values: Tensor, multiple: int) -> Tensor:
    """[N, K] with zeros below and to the right."""
    rows, columns = values.shape
    return F.pad(values, (0, -columns % multiple, 0, -rows % LANES)).contiguous()
