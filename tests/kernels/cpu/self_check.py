"""Builds and runs self_check.cpp: the CPU kernels and a scalar check of them as one program, without Python."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from compress.kernels.cpu import build

UNIT = Path(__file__).parent / "self_check.cpp"


def compiled(command: Sequence[str], flags: Sequence[str], folder: Path) -> Path:
    """The program in `folder`, compiled with the library's flags, then `flags`: where two differ, the last counts."""
    program = folder / "self_check"
    shared = [flag for flag in build.FLAGS if flag not in ("-shared", "-fPIC")]
    call = [*command, *shared, *flags, f"-I{build.SOURCE}", str(UNIT), "-o", str(program)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return program


def passes(command: Sequence[str | Path], threads: int, rounds: int) -> None:
    """Run the program. threads: of its pool. rounds: how often each pool is put to work."""
    call = [*map(str, command), str(threads), str(rounds)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.endswith("all good\n"), (done.stdout + done.stderr)[-8000:]
