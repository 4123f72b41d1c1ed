"""Keep freed memory from counting: peak memory then follows what is in use."""

from __future__ import annotations

import ctypes
import os
import sys

import torch

# mallopt's M_MMAP_THRESHOLD, and the size from which a tensor gets pages of its own that go back when it is freed.
MMAP_THRESHOLD = -3
OWN_PAGES = 8 << 20
# torch asks the kernel for huge pages where this is set: fresh pages then cost one fault per 2 MiB, not per 4 KiB.
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


def bound_heap() -> None:
    """Give large tensors pages of their own for the rest of the process; to be called before the first of them.

    glibc raises this threshold to the largest block freed so far, up to 32 MiB; what is smaller shares a heap. A hole
    there does not take the next tensor of its size, since aligned memory asks for a little more than it keeps: merely
    building a model's skeleton, which makes each parameter and drops it, would leave holes in proportion to the
    model's depth. Tensors of any size then go into these holes, and more of them stay resident with every block.

    Huge pages make up for the time that fresh pages cost. Where the process has made a tensor before, or the kernel
    has none, nothing does, and the result is the same.
    """
    mallopt = _libc("mallopt")
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, OWN_PAGES)
        os.environ.setdefault(HUGE_PAGES, "1")


def release_memory(device: torch.device) -> None:
    """Return freed pages to the system, on the CPU and on a GPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim = _libc("malloc_trim")
    if trim is not None:
        trim(0)


def _libc(name: str) -> ctypes._NamedFuncPointer | None:
    """A function of glibc; None on systems that have another C library."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
