"""The safetensors header: 8 bytes of length, then JSON that names every tensor; read with every claim checked.

Format: https://github.com/huggingface/safetensors#format. A header comes from a file that anyone may have written, so
lengths, dtypes, shapes and offsets are held against the size of the file before any of them is used.
"""

from __future__ import annotations

import json
import os
import reprlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from compress.checkpoint.strict_json import parse_object
from compress.errors import InputError

LENGTH_BYTES = 8
MAXIMUM_HEADER = 100_000_000  # what the safetensors package accepts
AGAIN = "copy or download it again"

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """Where a stored tensor lies: `nbytes` bytes from byte `offset` of `file`, counted from the file's start."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """The free-text metadata of a safetensors file and its tensors in the order of their data."""

    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]


def read_header(file: Path) -> Header:
    """The header of a safetensors file.

    Raises InputError, naming file, field and value, unless the header is well formed and its tensors cover the data
    area from its first byte to the last byte of the file, without gaps or overlaps.
    """
    try:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = _header_length(file, size, stream.read(LENGTH_BYTES))
            text = stream.read(length)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}): give a readable safetensors file") from error
    entries = parse_object(text, f"{file}: header")
    metadata = _metadata(file, entries.pop("__metadata__", {}))
    data_start = LENGTH_BYTES + length
    tensors = [_tensor(file, name, entry, data_start) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _check_coverage(file, tensors, data_start, size)
    return Header(metadata, {tensor.name: tensor for tensor in tensors})


def encode_header(tensors: Iterable[TensorInfo], metadata: Mapping[str, str], area: int) -> bytes:
    """The first `area` bytes of a safetensors file whose data starts at byte `area`: length, JSON, trailing spaces.

    Raises ValueError if the JSON does not fit.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    for tensor in tensors:
        start = tensor.offset - area
        entries[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = area - LENGTH_BYTES
    if len(text) > length:
        raise ValueError(f"a safetensors header of {len(text)} bytes does not fit in the {length} reserved for it")
    return struct.pack("<Q", length) + text.ljust(length)


def _header_length(file: Path, size: int, first: bytes) -> int:
    if size < LENGTH_BYTES:
        raise InputError(f"{file}: holds {size} bytes, too few for a safetensors file: {AGAIN}")
    (length,) = struct.unpack("<Q", first)
    if length > MAXIMUM_HEADER:
        raise InputError(f"{file}: header length is {length}, so this is no safetensors file: {AGAIN}")
    if LENGTH_BYTES + length > size:
        raise InputError(f"{file}: is truncated, {size} bytes with a header of {length}: {AGAIN}")
    return int(length)


def _metadata(file: Path, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise InputError(f"{file}: header field '__metadata__' is not a map of strings: {AGAIN}")
    return value


def _tensor(file: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    def wrong(field: str, value: object, problem: str) -> InputError:
        return InputError(f"{file}: tensor {name!r}: {field} is {reprlib.repr(value)}, {problem}: {AGAIN}")

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise wrong("header entry", entry, "not dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InputError(f"{file}: tensor {name!r}: dtype is {dtype!r}, which cannot be read here: store it as BF16")
    if not _are_sizes(shape):
        raise wrong("shape", shape, "not a list of sizes")
    if prod(max(size, 1) for size in shape) >= 1 << 59:  # a zero lets the others overflow strides unnoticed
        raise wrong("shape", shape, "larger than any memory")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong("data_offsets", offsets, "not a start and an end")
    start, end = offsets
    nbytes = prod(shape) * DTYPES[dtype].itemsize
    if end - start != nbytes:
        raise wrong("data_offsets", offsets, f"not the {nbytes} bytes of {dtype} {shape}")
    return TensorInfo(name, file, DTYPES[dtype], tuple(shape), data_start + start, nbytes)


def _are_sizes(value: Any) -> bool:
    # `type(x) is int` and not isinstance, because JSON true would pass as 1.
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _check_coverage(file: Path, tensors: list[TensorInfo], data_start: int, size: int) -> None:
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            relation = "overlaps the one before it" if tensor.offset < end else "leaves a gap before it"
            raise InputError(f"{file}: tensor {tensor.name!r} at byte {tensor.offset} {relation}: {AGAIN}")
        end = tensor.offset + tensor.nbytes
    if end > size:
        raise InputError(f"{file}: is truncated, {size} bytes where its header promises {end}: {AGAIN}")
    if end < size:
        raise InputError(f"{file}: holds {size - end} bytes after its last tensor: {AGAIN}")
