"""Which kernel multiplies a format on a device: the first in order of speed that does not refuse."""

from __future__ import annotations

import torch

from compress.errors import InputError
from compress.kernels import Kernel, reference

KERNELS: tuple[Kernel, ...] = (reference,)


def pick(format_name: str, device: torch.device | str) -> Kernel:
    """The kernel for weights stored as `format_name` on `device`; InputError with every refusal if there is none."""
    refusals = []
    for kernel in KERNELS:
        reason = kernel.refuses(format_name, torch.device(device))
        if reason is None:
            return kernel
        refusals.append(f"{kernel.NAME}: {reason}")
    raise InputError(f"format: {format_name!r} has no kernel on {device} ({'; '.join(refusals)}): export it as 'dense'")
