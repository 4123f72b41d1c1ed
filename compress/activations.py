"""A bounded store for the hidden states that travel from block to block: memory first, the rest on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor


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
        self.file: BinaryIO | None = None

    def __len__(self) -> int:
        return len(self.memory)

    def append(self, batch: Tensor) -> None:
        """Store one more batch, on the CPU."""
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
        """Overwrite batch `index` by its successor of the same shape."""
        batch = batch.detach().to("cpu").contiguous()
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
        file = self._open()
        file.seek(offset)
        file.readinto(batch.view(torch.uint8).numpy())  # type: ignore[attr-defined]
        return batch

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def close(self) -> None:
        """Drop all batches and the spill file."""
        self.memory.clear()
        if self.file is not None:
            self.file.close()
            self.file = None
            self.path.unlink(missing_ok=True)

    def _open(self) -> BinaryIO:
        if self.file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("w+b", buffering=0)
        return self.file

    def _write(self, index: int, batch: Tensor) -> None:
        file = self._open()
        file.seek(self.places[index][0])
        view = batch.view(torch.uint8).numpy().reshape(-1).data
        written = 0
        while written < len(view):
            written += file.write(view[written:])
