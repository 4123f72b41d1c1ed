"""A bounded store for the hidden states that travel from block to block: memory first, the rest on disk."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint.disk import explained, opened, read_into, tensor_bytes, write_at
from compress.errors import InputError


class ActivationBuffer:
    """Batches of hidden states [batch, tokens, width], each replaced in place once its block has run.

    Batches are kept in memory while they fit in `budget` bytes; later ones are written to one file in `spill_folder`,
    which is removed by `close`. Order and shapes are those of the first pass.
    """

    def __init__(self, budget: int, spill_folder: Path) -> None:
        self.budget = budget
        self.path = spill_folder / "activations.spill"
        self.memory: list[Tensor | None] = []
        self.places: list[tuple[int, torch.Size, torch.dtype]] = []
        self.resident = 0
        self.spilled = 0

    def __len__(self) -> int:
        return len(self.memory)

    def append(self, batch: Tensor) -> None:
        """Store one more batch, on the CPU. Raises InputError where the disk is full."""
        batch = batch.detach().to("cpu").contiguous()
        self.places.append((self.spilled, batch.shape, batch.dtype))
        if self.resident + batch.nbytes <= self.budget:
            self.memory.append(batch)
            self.resident += batch.nbytes
            return
        self.memory.append(None)
        self.spilled += batch.nbytes
        self._write(len(self.memory) - 1, batch)

    def replace(self, index: int, batch: Tensor) -> None:
        """Overwrite batch `index` by its successor. Raises ValueError for one of another shape or dtype."""
        batch = batch.detach().to("cpu").contiguous()
        _, shape, dtype = self.places[index]
        if (batch.shape, batch.dtype) != (shape, dtype):
            raise ValueError(f"batch {index} was {dtype} {tuple(shape)}, not {batch.dtype} {tuple(batch.shape)}")
        if self.memory[index] is None:
            self._write(index, batch)
        else:
            self.memory[index] = batch

    def __getitem__(self, index: int) -> Tensor:
        kept = self.memory[index]
        if kept is not None:
            return kept
        offset, shape, dtype = self.places[index]
        batch = torch.empty(shape, dtype=dtype)
        with explained(self.path), opened(self.path) as descriptor:
            if read_into(descriptor, tensor_bytes(batch), offset) < batch.nbytes:
                raise InputError(f"{self.path}: became shorter while it was in use: run the same command again")
        return batch

    def close(self) -> None:
        """Drop all batches and the spill file."""
        self.memory.clear()
        self.path.unlink(missing_ok=True)

    def _write(self, index: int, batch: Tensor) -> None:
        with explained(self.path, batch.nbytes):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with opened(self.path, os.O_WRONLY | os.O_CREAT) as descriptor:
                write_at(descriptor, tensor_bytes(batch), self.places[index][0])
