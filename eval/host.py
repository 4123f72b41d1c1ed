"""The machine and the packages that figures were measured with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKAGES = ("lmpress", "torch", "transformers")


def host(device: torch.device, bandwidth: float, threads: int) -> dict[str, Any]:
    """The report's `host`; `bandwidth` in bytes per second, `threads` of the CPU that computed."""
    import torch

    return {
        "cpu": _processor(),
        "threads": threads,
        "memory_bandwidth_gbs": bandwidth / 1e9,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def versions() -> dict[str, str | None]:
    """The report's `versions`; None for a package that is not installed."""
    return {"python": platform.python_version(), **{name: installed(name) for name in PACKAGES}}


def installed(package: str) -> str | None:
    """The version of an installed package; None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's model name where Linux tells it, else its architecture."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8", errors="replace").splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
