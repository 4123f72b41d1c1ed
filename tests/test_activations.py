"""The activation buffer: what goes in comes out, within its memory budget, with the rest on disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from compress.activations import ActivationBuffer
from compress.errors import InputError

BATCH = (2, 3, 4)
BYTES = 2 * 3 * 4 * 4


@pytest.mark.parametrize("kept", [0, 2, 5], ids=["all on disk", "two in memory", "all in memory"])
def test_batches_survive_replacement_wherever_they_lie(kept: int, tmp_path: Path) -> None:
    buffer = ActivationBuffer(kept * BYTES, tmp_path / "work")
    batches = [torch.full(BATCH, float(n)) for n in range(5)]
    for batch in batches:
        buffer.append(batch)
    assert buffer.resident == kept * BYTES and buffer.spilled == (5 - kept) * BYTES
    assert buffer.path.exists() == (kept < 5)
    assert all(torch.equal(buffer[n], batch) for n, batch in enumerate(batches))
    for n in (4, 0, 2):
        buffer.replace(n, batches[n] + 0.5)
    expected = [0.5, 1.0, 2.5, 3.0, 4.5]
    assert [float(buffer[n].mean()) for n in range(5)] == expected
    buffer.close()
    assert not buffer.path.exists() and len(buffer) == 0


def test_successors_of_another_shape_or_dtype_are_refused(tmp_path: Path) -> None:
    buffer = ActivationBuffer(0, tmp_path)
    buffer.append(torch.zeros(BATCH, dtype=torch.bfloat16))
    for other in (torch.zeros(BATCH), torch.zeros(1, 3, 4, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="batch 0 was torch.bfloat16"):
            buffer.replace(0, other)


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(InputError, match="activations.spill: the disk is full, 96 bytes more are needed"):
        ActivationBuffer(0, tmp_path).append(torch.zeros(BATCH))


def test_sixteen_bit_batches_keep_their_dtype_on_disk(tmp_path: Path) -> None:
    buffer = ActivationBuffer(0, tmp_path)
    batch = torch.randn(BATCH).to(torch.bfloat16)
    buffer.append(batch)
    assert buffer[0].dtype == torch.bfloat16 and torch.equal(buffer[0], batch)
    buffer.close()
