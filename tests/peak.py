"""`python -m tests.peak RECIPE`: run a recipe and print its peak resident bytes, predicted and seen, as JSON.

"heap" is the size of the C library's heap, holes included, once the run is planned and before a weight is read.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

from compress.pipeline import RunOptions, prepare, run
from compress.recipe import load


class Quiet:
    """An observer that looks away."""

    def event(self, kind: str, /, **fields: Any) -> None:
        pass


def peak_resident() -> int:
    """Peak resident bytes of this process alone: getrusage would count its parent's at the fork, too."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


class Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2 returns: ten counts, of which the first is the bytes of the heap that are not mapped."""

    _fields_ = [("arena", ctypes.c_size_t), ("others", ctypes.c_size_t * 9)]


def heap_size() -> int:
    """Bytes of address space that the main heap takes, used or not."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    return int(mallinfo().arena)


if __name__ == "__main__":
    recipe = load(sys.argv[1], sys.argv[2:])
    predicted = prepare(recipe).plan.peak_memory
    heap = heap_size()
    run(recipe, RunOptions(device="cpu"), Quiet())
    print(json.dumps({"predicted": predicted, "seen": peak_resident(), "heap": heap}))
