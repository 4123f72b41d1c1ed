"""The activation buffer: what goes in comes out, within its memory budget, with the rest on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compress.activations import ActivationBuffer

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
    assert all(torch.equal(mine, batch) for mine, batch in zip(buffer, batches, strict=True))
    for n in (4, 0, 2):
        buffer.replace(n, batches[n] + 0.5)
    expected = [0.5, 1.0, 2.5, 3.0, 4.5]
    assert [float(batch.mean()) for batch in buffer] == expected
    buffer.close()
    assert not buffer.path.exists() and len(buffer) == 0


def test_sixteen_bit_batches_keep_their_dtype_on_disk(tmp_path: Path) -> None:
    buffer = ActivationBuffer(0, tmp_path)
    batch = torch.randn(BATCH).to(torch.bfloat16)
    buffer.append(batch)
    assert buffer[0].dtype == torch.bfloat16 and torch.equal(buffer[0], batch)
    buffer.close()
