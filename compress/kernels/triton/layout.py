"""Device layouts of the stored tensors, and back: plain torch, exact both ways, no Triton.

`blocked` is what w4a16.py reads; its head says why. Everything else the kernels read as it is stored, but for outlier
weights, whose columns are padded to whole tiles.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LANES = 16  # int32 words of a block
WORD = 32


def block_columns(bits: int) -> int:
    """Columns of one block: 128 of 4 bits, 64 of 8."""
    return LANES * WORD // bits


def blocked(words: Tensor, bits: int) -> Tensor:
    """Stored words int32 [N, K * bits / 32] -> int32 [N, blocks * 16]; columns past K hold zero bits.

    Those columns meet activations that the kernels set to zero. Column j * 16 + w of a block is value j of word w.
    """
    values = _values(words, bits)
    values = F.pad(values, (0, -values.shape[1] % block_columns(bits)))
    return _words(values.unflatten(1, (-1, WORD // bits, LANES)).transpose(2, 3), bits)


def stored(words: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse of `blocked` for a weight of `columns` columns."""
    values = _values(words, bits).unflatten(1, (-1, LANES, WORD // bits)).transpose(2, 3)
    return _words(values.flatten(1)[:, :columns].unflatten(1, (-1, WORD // bits)), bits)


def split_groups(tensor: Tensor, group: int | None) -> tuple[Tensor, int | None]:
    """Scales or zero points [N, G] for groups whose size is a power of two, and that size: 96 becomes three times 32.

    The kernels find a column's group by a shift. None: one group per row.
    """
    if group is None:
        return tensor, None
    power = group & -group
    return tensor.repeat_interleave(group // power, dim=1).contiguous(), power


def outlier_tiles(weight: Tensor, tile: int) -> Tensor:
    """Outlier weights [N, n] -> [N, n up to a multiple of `tile`], padded with zeros."""
    return F.pad(weight, (0, -weight.shape[1] % tile)).contiguous()


def _values(words: Tensor, bits: int) -> Tensor:
    """int32 [N, W] -> uint8 [N, W * 32 / bits], lowest bits first."""
    values = words.contiguous().view(torch.uint8).view(words.shape[0], -1)
    if bits == 4:
        values = torch.stack((values & 15, values >> 4), dim=-1).flatten(1)
    return values


def _words(values: Tensor, bits: int) -> Tensor:
    """uint8 [N, ..., 32 / bits] -> int32 [N, W], lowest bits first."""
    values = values.contiguous().view(values.shape[0], -1)
    if bits == 4:
        values = values[:, 0::2] | (values[:, 1::2] << 4)
    return values.contiguous().view(torch.int32)
