"""The safetensors header: what the safetensors package writes is read exactly, and no false claim gets through."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compress.checkpoint.header import DTYPES, TensorInfo, encode_header, read_header
from compress.checkpoint.reader import read_tensor
from compress.errors import InputError


def write(file: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_reads_every_dtype_that_the_safetensors_package_writes(tmp_path: Path) -> None:
    wanted = {}
    for name, dtype in DTYPES.items():
        raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2
        wanted[f"tensor of {name}"] = raw.view(dtype).reshape(2, 3)
    save_file(wanted, tmp_path / "all.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "all.safetensors")
    assert header.metadata == {"format": "pt"}
    assert header.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        found = read_tensor(header.tensors[name])
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


def test_encode_fills_the_area_and_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    tensors = [
        TensorInfo("first \n näme", file, torch.bfloat16, (2, 2), 512, 8),
        TensorInfo("b", file, torch.uint8, (), 520, 1),
    ]
    encoded = encode_header(tensors, {"format": "pt"}, 512)
    assert len(encoded) == 512
    file.write_bytes(encoded + bytes(9))
    assert list(read_header(file).tensors.values()) == tensors
    with pytest.raises(ValueError, match="does not fit in the 92 reserved"):
        encode_header(tensors, {"format": "pt"}, 100)


FOUR = b"1234"
BAD: dict[str, tuple[Any, bytes, str]] = {
    "not json": (b"not json", FOUR, "not valid JSON"),
    "not utf-8": (b'{"\xff": 1}', FOUR, "not valid JSON"),
    "nested too deep": (b"[" * 100_000, FOUR, "not valid JSON"),
    "a number too long": (b"1" * 10_000, FOUR, "not valid JSON"),
    "not an object": ([1], FOUR, "is a JSON list"),
    "tensor twice": (b'{"a": 1, "a": 2}', FOUR, "key 'a' is given twice"),
    "metadata of numbers": ({"__metadata__": {"format": 1}, "a": entry()}, FOUR, "'__metadata__'"),
    "entry is a string": ({"a": "x"}, FOUR, "header entry is 'x'"),
    "entry lacks shape": ({"a": {"dtype": "U8", "data_offsets": [0, 4]}}, FOUR, "header entry is"),
    "entry has more": ({"a": entry() | {"extra": 1}}, FOUR, "header entry is"),
    "unknown dtype": ({"a": entry(dtype="Q4")}, FOUR, "dtype is 'Q4'"),
    "dtype is a list": ({"a": entry(dtype=["U8"])}, FOUR, "dtype is ['U8']"),
    "negative shape": ({"a": entry(shape=[-4])}, FOUR, "shape is [-4]"),
    "fractional shape": ({"a": entry(shape=[4.0])}, FOUR, "shape is [4.0]"),
    "true as a size": ({"a": entry(shape=[True], offsets=[0, 1])}, b"1", "shape is [True]"),
    "shape is a number": ({"a": entry(shape=4)}, FOUR, "shape is 4"),
    "three offsets": ({"a": entry(offsets=[0, 4, 4])}, FOUR, "data_offsets is [0, 4, 4]"),
    "offsets reversed": ({"a": entry(offsets=[4, 0])}, FOUR, "data_offsets is [4, 0]"),
    "offsets do not match": ({"a": entry(dtype="F32")}, FOUR, "not the 16 bytes of F32 [4]"),
    "shape beyond 64 bits": ({"a": entry(shape=[2**40, 2**40])}, FOUR, "larger than any memory"),
    "empty shape beyond 64 bits": (
        {"a": entry(shape=[0, 2**62, 2**62], offsets=[0, 0])},
        b"",
        "larger than any memory",
    ),
    "overlap": ({"a": entry(), "b": entry(offsets=[3, 7])}, b"1234567", "'b' at byte"),
    "gap": ({"a": entry(), "b": entry(offsets=[5, 9])}, b"123456789", "leaves a gap"),
    "starts late": ({"a": entry(offsets=[4, 8])}, b"12345678", "leaves a gap"),
    "data truncated": ({"a": entry()}, b"123", "is truncated"),
    "more data": ({"a": entry()}, b"12345", "1 bytes after its last tensor"),
}


@pytest.mark.parametrize("case", BAD)
def test_false_headers_are_one_line_errors(tmp_path: Path, case: str) -> None:
    header, data, phrase = BAD[case]
    file = write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(InputError) as caught:
        read_header(file)
    message = str(caught.value)
    assert phrase in message and str(file) in message and "\n" not in message
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("content", "phrase"),
    [
        (b"", "holds 0 bytes"),
        (b"1234567", "holds 7 bytes"),
        (struct.pack("<Q", 2**63), "header length is 9223372036854775808"),
        (struct.pack("<Q", 100) + b"{}", "is truncated, 10 bytes with a header of 100"),
        (struct.pack("<Q", 0), "not valid JSON"),
    ],
)
def test_short_files_are_one_line_errors(tmp_path: Path, content: bytes, phrase: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=phrase):
        read_header(tmp_path / "model.safetensors")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.arange(5), "b": torch.ones(3)}, tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut.safetensors").write_bytes(whole[:length])
        with pytest.raises(InputError, match="cut.safetensors"):
            read_header(tmp_path / "cut.safetensors")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.safetensors: cannot be read \(No such file or directory\)"):
        read_header(tmp_path / "none.safetensors")
