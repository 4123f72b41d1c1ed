"""The native key and value cache: panels as the C++ attention reads them (source/attention.h draws the layout)."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.kernels.cpu.layout import LANES
from compress.kernels.cpu.library import TYPES, CacheLayout
from compress.runtime.config import ModelConfig, Rope
from compress.runtime.decoder import frequencies

# int8 comes with one float32 step per token and head, the token's largest magnitude over 127.
CACHE_TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


class PanelCache:
    """Keys and values of every layer for `batch` sequences of at most `capacity` tokens, all of the same length.

    Pages that were never written cost no memory, so a generous capacity is free.
    """

    def __init__(self, config: ModelConfig, batch: int, capacity: int, dtype: torch.dtype) -> None:
        """dtype: float32, bfloat16 or int8."""
        self.batch, self.length, self.dtype = batch, 0, dtype
        self.capacity = capacity
        self.room = capacity + -capacity % LANES
        heads = (config.layer_count, batch, config.kv_heads)
        channels = config.head_dim + -config.head_dim % LANES
        self.keys = torch.empty(*heads, self.room // LANES, config.head_dim, LANES, dtype=dtype)
        self.values = torch.empty(*heads, channels // LANES, self.room, LANES, dtype=dtype)
        self.steps = torch.empty(2, *heads, self.room if dtype == torch.int8 else 0)
        self.rotations = {rope: _rotation(rope, self.room, config.head_dim) for rope in set(config.ropes)}

    def layout(self) -> CacheLayout:
        """What the library needs to know of the cache as it stands."""
        return CacheLayout(
            keys=self.keys.data_ptr(),
            values=self.values.data_ptr(),
            key_steps=self.steps[0].data_ptr(),
            value_steps=self.steps[1].data_ptr(),
            batch=self.batch,
            capacity=self.room,
            length=self.length,
            type=TYPES[self.dtype],
        )


def _rotation(rope: Rope, positions: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles: float32 [positions, d / 2] each."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies(rope, head_dim))
    return angles.cos(), angles.sin()
