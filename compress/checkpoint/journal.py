"""The journal of an unfinished checkpoint: a header line, then one synced JSON line per finished section.

A line counts once its newline is there and it parses; whatever follows the last good line is what a kill left behind.
The journal's file lock, which the kernel drops when its process dies, keeps a second run out of the folder.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.checkpoint.disk import read_into, write_at
from compress.checkpoint.header import DTYPE_NAMES, DTYPES, TensorInfo
from compress.checkpoint.strict_json import parse_object
from compress.errors import InputError


@dataclass(frozen=True)
class Entry:
    """A finished section: where its tensors lie, the sha256 of their bytes, and the caller's record about it."""

    section: str
    tensors: dict[str, TensorInfo]
    sha256: dict[str, str]
    record: dict[str, Any]

    def to_line(self) -> dict[str, Any]:
        """The entry as the object of its journal line."""
        tensors = {
            name: {
                "dtype": DTYPE_NAMES[info.dtype],
                "shape": list(info.shape),
                "offset": info.offset,
                "nbytes": info.nbytes,
                "sha256": self.sha256[name],
            }
            for name, info in self.tensors.items()
        }
        return {"section": self.section, "tensors": tensors, "record": self.record}

    @classmethod
    def from_line(cls, line: dict[str, Any], file: Path) -> Entry:
        """The entry behind a journal line of ours, its tensors lying in `file`."""
        tensors = {
            name: TensorInfo(
                name, file, DTYPES[stored["dtype"]], tuple(stored["shape"]), stored["offset"], stored["nbytes"]
            )
            for name, stored in line["tensors"].items()
        }
        sha256 = {name: stored["sha256"] for name, stored in line["tensors"].items()}
        return cls(line["section"], tensors, sha256, line["record"])


class Journal:
    """An open, locked journal. `lines` are its good lines, as they were found and as they are appended."""

    def __init__(self, path: Path) -> None:
        """Open or create `path` and lock it. Raises InputError if another process holds it, OSError otherwise."""
        # Not in append mode, where the kernel ignores the position of a write. A file object, so that it closes itself.
        self._stream = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b", buffering=0)
        try:
            fcntl.lockf(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise InputError(f"{path}: another run is writing here: wait for it or give another output") from error
        self._lines: list[dict[str, Any]] = []
        self._ends: list[int] = [0]
        text = bytearray(os.fstat(self._descriptor).st_size)
        read_into(self._descriptor, memoryview(text), 0)
        for raw in bytes(text).splitlines(keepends=True):
            if not self._accept(path, raw):
                break

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The good lines."""
        return list(self._lines)

    def append(self, line: dict[str, Any]) -> None:
        """Add `line` and sync it. Raises OSError, and ValueError for NaN or infinity, which JSON cannot hold."""
        raw = json.dumps(line, allow_nan=False).encode() + b"\n"
        write_at(self._descriptor, raw, self._ends[-1])
        os.fsync(self._descriptor)
        self._lines.append(line)
        self._ends.append(self._ends[-1] + len(raw))

    def keep(self, count: int) -> None:
        """Drop everything behind the first `count` good lines."""
        del self._lines[count:], self._ends[count + 1 :]
        os.ftruncate(self._descriptor, self._ends[-1])
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close and unlock."""
        self._stream.close()

    @property
    def _descriptor(self) -> int:
        return self._stream.fileno()

    def _accept(self, path: Path, raw: bytes) -> bool:
        if not raw.endswith(b"\n"):
            return False
        try:
            self._lines.append(parse_object(raw, path))
        except InputError:
            return False
        self._ends.append(self._ends[-1] + len(raw))
        return True
