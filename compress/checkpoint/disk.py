"""Disk access with positions instead of cursors, nothing mapped, and operating-system errors put in words."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from compress.errors import InputError

CHUNK_BYTES = 4 << 20


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; writing to them changes the tensor."""
    # Not reshape(-1), which keeps the arbitrary stride of a lone element.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def read_into(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from byte `offset`; the bytes read, fewer than asked for only where the file ends."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at byte `offset`. Raises OSError."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def read_chunks(descriptor: int, offset: int, nbytes: int) -> Iterator[memoryview]:
    """Up to `nbytes` bytes from byte `offset` in pieces, each valid until the next; ends early where the file ends."""
    buffer = memoryview(bytearray(min(CHUNK_BYTES, nbytes)))
    done = 0
    while done < nbytes:
        count = read_into(descriptor, buffer[: min(CHUNK_BYTES, nbytes - done)], offset + done)
        if count == 0:
            return
        yield buffer[:count]
        done += count


def drop_cache(descriptor: int) -> None:
    """Ask the kernel to forget the file's synced pages, so that the next read comes from the disk, where it can."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """A file descriptor for the length of a `with` block. Raises OSError."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: a synced file may otherwise be lost with its directory entry."""
    with opened(folder) as descriptor:
        os.fsync(descriptor)


def write_file(path: Path, content: str | bytes | Path) -> None:
    """Write text, bytes or a copy of a file to `path`, folders included, and sync it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as target:
        if isinstance(content, Path):
            with opened(content) as source:
                offset = 0
                for chunk in read_chunks(source, 0, os.fstat(source).st_size):
                    write_at(target, chunk, offset)
                    offset += len(chunk)
        else:
            write_at(target, content.encode() if isinstance(content, str) else content, 0)
        os.fsync(target)
    sync_folder(path.parent)


def check_space(folder: Path, needed: int) -> None:
    """Raise InputError unless the disk that holds the existing `folder` has `needed` bytes to spare."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InputError(
            f"{folder}: needs {needed} bytes, the disk has {free} free: free some space or give another output folder"
        )


@contextmanager
def explained(path: Path, needed: int = 0) -> Iterator[None]:
    """Turn an OSError inside the `with` block into an InputError that names the file; `needed`: bytes still to come."""
    try:
        yield
    except OSError as error:
        file = error.filename or path
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            short = f", {needed} bytes more are needed" if needed else ""
            raise InputError(
                f"{file}: the disk is full{short}: free some space and run the same command again, it goes on from here"
            ) from error
        raise InputError(
            f"{file}: cannot be used ({error.strerror}): check its permissions or give another output folder"
        ) from error
