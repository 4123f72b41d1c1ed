"""The GGUF container: read back by the gguf package, whole or not there, nobody's file overwritten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from torch import Tensor

from compress.checkpoint.interop import gguf_file as container
from compress.checkpoint.interop.exported import unwatched
from compress.errors import InputError

VALUES = {
    "general.architecture": container.string("llama"),
    "a.count": container.uint32(4_000_000_000),
    "a.share": container.float32(0.25),
    "a.switch": container.boolean(True),
    "a.words": container.strings(["", "zwei", "\u2581drei"]),
    "a.nothing": container.strings([]),
    "a.numbers": container.int32s([-1, 7]),
    "a.scores": container.float32s([-1.5, 0.0]),
}


def planned(name: str, tensor: Tensor, pieces: int = 1) -> container.Planned:
    kind = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[tensor.dtype]
    chunks = [chunk.view(torch.uint8) for chunk in tensor.chunk(pieces)]
    return container.Planned(name, kind, tuple(tensor.shape), lambda: chunks)


def test_the_gguf_package_reads_it(tmp_path: Path) -> None:
    tensors = {"odd": torch.randn(3), "matrix": torch.randn(5, 7).half(), "last": torch.randn(2, 2).bfloat16()}
    plan = [planned("odd", tensors["odd"]), planned("matrix", tensors["matrix"], 2), planned("last", tensors["last"])]
    file = tmp_path / "deep" / "model.gguf"
    nbytes = container.write(file, VALUES, plan, False, unwatched)
    assert file.stat().st_size == nbytes and [path.name for path in file.parent.iterdir()] == ["model.gguf"]
    reader = GGUFReader(file)
    read = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert read.pop("a.nothing") == []
    assert read == {
        "general.architecture": "llama",
        "a.count": 4_000_000_000,
        "a.share": 0.25,
        "a.switch": True,
        "a.words": ["", "zwei", "\u2581drei"],
        "a.numbers": [-1, 7],
        "a.scores": [-1.5, 0.0],
    }
    for tensor in reader.tensors:
        expected = tensors[tensor.name]
        assert tuple(tensor.shape) == tuple(reversed(expected.shape)) and tensor.data_offset % container.ALIGNMENT == 0
        assert np.array_equal(tensor.data.view(np.uint8).flatten(), expected.view(torch.uint8).numpy().flatten())


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[Tensor]:
        yield torch.zeros(8, dtype=torch.uint8)
        raise InputError("no more")

    plan = [container.Planned("a", "F32", (4,), broken)]
    with pytest.raises(InputError, match="no more"):
        container.write(tmp_path / "model.gguf", VALUES, plan, False, unwatched)
    with pytest.raises(ValueError, match="16 planned"):
        short = container.Planned("a", "F32", (4,), lambda: [torch.zeros(8, dtype=torch.uint8)])
        container.write(tmp_path / "model.gguf", VALUES, [short], False, unwatched)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_stays(tmp_path: Path) -> None:
    file, plan = tmp_path / "model.gguf", [planned("a", torch.ones(4))]
    container.write(file, VALUES, plan, False, unwatched)
    before = file.read_bytes()
    with pytest.raises(InputError, match="exists already"):
        container.write(file, {}, plan, False, unwatched)
    assert file.read_bytes() == before
    container.write(file, {}, plan, True, unwatched)
    assert file.read_bytes() != before
    partial = tmp_path / "other.gguf.partial"
    partial.write_text("a letter to myself")
    with pytest.raises(InputError, match="not written by lmpress"):
        container.write(tmp_path / "other.gguf", VALUES, plan, True, unwatched)
    assert partial.read_text() == "a letter to myself"
    file.write_text("a letter to somebody")
    with pytest.raises(InputError, match="not a GGUF file"):
        container.write(file, VALUES, plan, True, unwatched)
    assert file.read_text() == "a letter to somebody"
