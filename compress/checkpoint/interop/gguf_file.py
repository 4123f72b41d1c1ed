"""The GGUF container, version 3: typed metadata, a table of tensors, then their bytes, each aligned to 32.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Written here and not with the gguf package, whose
writer takes no empty list (a tokenizer without merges has one) and does not sync; tests read the result with it.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

from torch import Tensor

from compress.checkpoint.disk import check_space, explained, opened, sync_folder, tensor_bytes, write_at
from compress.checkpoint.interop.exported import Progress
from compress.errors import InputError

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32

# Tags of metadata values, as the format numbers them.
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9

# Tensor type -> its number in ggml, weights per block, bytes per block.
TYPES = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q8_0": (8, 32, 34), "BF16": (30, 1, 2)}

Metadata = Mapping[str, bytes]  # key -> tag and value as they stand in the file


def uint32(value: int) -> bytes:
    return struct.pack("<II", UINT32, value)


def float32(value: float) -> bytes:
    return struct.pack("<If", FLOAT32, value)


def boolean(value: bool) -> bytes:
    return struct.pack("<I?", BOOL, value)


def string(value: str) -> bytes:
    return struct.pack("<I", STRING) + _text(value)


def strings(values: Sequence[str]) -> bytes:
    return struct.pack("<IIQ", ARRAY, STRING, len(values)) + b"".join(map(_text, values))


def int32s(values: Sequence[int]) -> bytes:
    return struct.pack(f"<IIQ{len(values)}i", ARRAY, INT32, len(values), *values)


def float32s(values: Sequence[float]) -> bytes:
    return struct.pack(f"<IIQ{len(values)}f", ARRAY, FLOAT32, len(values), *values)


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: its name, type, shape (rows first), and what gives its bytes as uint8 tensors in turn."""

    name: str
    kind: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        _, block, nbytes = TYPES[self.kind]
        return prod(self.shape) // block * nbytes


def write(output: Path, metadata: Metadata, tensors: Sequence[Planned], replace: bool, progress: Progress) -> int:
    """Write a GGUF file; `output` appears when it is whole. Returns its bytes.

    replace: another GGUF file of that name may be there. Raises InputError for a name that is taken and for a disk that
    is full or fails, ValueError for a tensor whose chunks do not come to its plan.
    """
    start = header(metadata, tensors)
    total = len(start) + sum(_padded(tensor.nbytes) for tensor in tensors)
    refuse_taken(output, replace)
    partial = output.with_name(output.name + ".partial")
    with explained(partial):
        output.parent.mkdir(parents=True, exist_ok=True)
        check_space(output.parent, total)
        with _ours_alone(partial) as descriptor:
            write_at(descriptor, start, 0)
            offset = len(start)
            for tensor in tensors:
                end = offset
                for chunk in tensor.chunks():
                    write_at(descriptor, tensor_bytes(chunk.contiguous()), end)
                    end += chunk.nbytes
                    progress("writing", end, total)
                if end - offset != tensor.nbytes:
                    raise ValueError(f"{tensor.name}: {end - offset} bytes, {tensor.nbytes} planned")
                offset += _padded(tensor.nbytes)
            os.ftruncate(descriptor, total)
            os.fsync(descriptor)
            refuse_taken(output, replace)
            os.replace(partial, output)
        sync_folder(output.parent)
    return total


def header(metadata: Metadata, tensors: Sequence[Planned]) -> bytes:
    """Everything in front of the data. Shapes go innermost first; offsets count from the end of the header."""
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    parts += [_text(key) + value for key, value in metadata.items()]
    offset = 0
    for tensor in tensors:
        sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        parts.append(_text(tensor.name) + sizes + struct.pack("<IQ", TYPES[tensor.kind][0], offset))
        offset += _padded(tensor.nbytes)
    text = b"".join(parts)
    return text.ljust(_padded(len(text)), b"\0")


def refuse_taken(output: Path, replace: bool) -> None:
    """Raise InputError if `output` exists, unless it is a GGUF file and may be replaced."""
    if not os.path.lexists(output):
        return
    if not replace:
        raise InputError(f"{output}: exists already: give another --output, or --restart to replace it")
    with explained(output):
        if not output.is_file() or output.open("rb").read(len(MAGIC)) != MAGIC:
            raise InputError(f"{output}: is not a GGUF file, so it is not replaced: give another --output")


@contextmanager
def _ours_alone(partial: Path) -> Iterator[int]:
    """A descriptor of the empty file `partial`, locked against a second export. It goes where the block fails."""
    with opened(partial, os.O_RDWR | os.O_CREAT) as descriptor:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise InputError(
                f"{partial}: another export is writing here: wait for it or give another output"
            ) from error
        if os.pread(descriptor, len(MAGIC), 0) not in (b"", MAGIC):
            raise InputError(f"{partial}: was not written by lmpress: move it away or give another output")
        os.ftruncate(descriptor, 0)
        finished = False
        try:
            yield descriptor
            finished = True
        finally:
            if not finished:
                partial.unlink(missing_ok=True)


def _text(value: str) -> bytes:
    data = value.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
