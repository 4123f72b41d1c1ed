"""Memory: the process's peak resident set, and the device's peak where there is one."""

from __future__ import annotations

import resource
import sys

import torch


def peak_resident_bytes() -> int:
    """The largest resident set this process has had since it started: the system offers no way to reset it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def peak_device_bytes(device: torch.device) -> int | None:
    """The most bytes that tensors have held on a CUDA device since the process started; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
