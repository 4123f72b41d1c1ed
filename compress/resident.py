"""Keep freed memory from counting: peak memory then follows what is in use."""

from __future__ import annotations

import ctypes
import sys

import torch

# mallopt's M_MMAP_THRESHOLD, and the size from which a tensor gets pages of its own that go back when it is freed.
MMAP_THRESHOLD = -3
OWN_PAGES = 16 << 20


def bound_heap() -> None:
    """Give large tensors pages of their own for the rest of the process.

    glibc raises this threshold to the largest tensor freed so far; from then on such tensors share its heaps, whose
    fragments grow with every block of a walk.
    """
    mallopt = _libc("mallopt")
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, OWN_PAGES)


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
