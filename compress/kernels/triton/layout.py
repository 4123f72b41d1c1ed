"""Device layouts of the stored tensors, and back: plain torch, exact both ways, no Triton.

`blocked` is what w4a16.py reads; its head says why. Everything else the kernels read as it is stored, but for outlier
weights, whose columns are padded to whole tiles.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from compress.formats.pack_quantized import WORD, pack_words, unpack_words
from compress.kernels.triton.launch import block_columns

LANES = 16  # int32 words of a block


def blocked(words: Tensor, bits: int) -> Tensor:
    """Stored words int32 [N, K * bits / 32] -> int32 [N, blocks * 16]; columns past K hold zero bits.

    Those columns meet activations that the kernels set to zero. Column j * 16 + w of a block is value j of word w.
    """
    values = unpack_words(words, bits)
    values = F.pad(values, (0, -values.shape[1] % block_columns(bits)), value=-(1 << (bits - 1)))
    return pack_words(values.unflatten(1, (-1, WORD // bits, LANES)).transpose(2, 3).flatten(1), bits)


def stored(words: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse of `blocked` for a weight of `columns` columns."""
    values = unpack_words(words, bits).unflatten(1, (-1, LANES, WORD // bits)).transpose(2, 3)
    return pack_words(values.flatten(1)[:, :columns], bits)


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
