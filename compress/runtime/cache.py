"""The key and value cache: one contiguous block of memory per model, filled from the left."""

from __future__ import annotations

from torch import Tensor

from compress.runtime.config import ModelConfig


class Cache:
    """Keys and values of every layer for `batch` sequences of at most `capacity` tokens, all of the same length.

    Pages that were never written cost no memory, so a generous capacity is free on the CPU.
    """

    def __init__(self, config: ModelConfig, batch: int, capacity: int, like: Tensor) -> None:
        """`like` is a tensor whose dtype and device the cache takes."""
        shape = (config.layer_count, 2, batch, config.kv_heads, capacity, config.head_dim)
        self.store = like.new_empty(shape)  # [layers, keys and values, B, h, capacity, d]
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.store.shape[4]

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append key and value [B, h, T, d] of one layer; returns all of that layer's so far, [B, h, length + T, d].

        Raises ValueError beyond the capacity. `advance` moves on once every layer has been extended.
        """
        end = self.length + key.shape[2]
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens and {end} were given")
        keys, values = self.store[layer]
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, count: int) -> None:
        self.length += count
