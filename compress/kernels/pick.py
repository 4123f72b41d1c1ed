"""Which kernel multiplies a scheme on a device: the first in order of speed that does not refuse."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compress.errors import InputError
from compress.formats.scheme import Scheme
from compress.kernels import Kernel, reference
from compress.kernels.cpu import build
from compress.kernels.cpu.kernel import CpuKernel
from compress.kernels.cpu.kernel import refuses as library_refuses
from compress.kernels.cpu.library import Engine

KERNELS: tuple[Kernel, ...] = (reference,)


def pick(scheme: Scheme, device: torch.device | str, kernels: Sequence[Kernel] = KERNELS) -> Kernel:
    """The kernel for weights of `scheme` on `device`; InputError with every refusal if there is none."""
    refusals = []
    for kernel in kernels:
        reason = kernel.refuses(scheme, torch.device(device))
        if reason is None:
            return kernel
        refusals.append(f"{kernel.NAME}: {reason}")
    raise InputError(
        f"format: {scheme.format!r} has no kernel on {device} ({'; '.join(refusals)}): export it as 'dense'"
    )


def cpu_kernel(threads: int | None = None) -> CpuKernel:
    """The native kernel of this processor, built or found. Raises build.Unavailable with the reason."""
    return CpuKernel(Engine(threads))


def expected(scheme: Scheme, device: torch.device | str) -> str:
    """The name of the kernel that will multiply `scheme` on `device`, told without building anything."""
    if torch.device(device).type == "cpu" and library_refuses(scheme) is None:
        try:
            build.compiler()
            return f"cpu-{build.choose()}"
        except build.Unavailable:
            pass
    return pick(scheme, device).NAME
