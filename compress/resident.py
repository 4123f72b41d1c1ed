"""Give freed memory back to the operating system, so that peak memory follows what is in use."""

from __future__ import annotations

import ctypes
import sys

import torch


def release_memory(device: torch.device) -> None:
    """Return freed pages to the system, on the CPU and on a GPU.

    glibc keeps what was freed in its heaps: over a walk of equal blocks its fragments add up to several blocks.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
