"""The NEON variant on a machine of another architecture: compiled across, and run under emulation.

Debian: apt install g++-aarch64-linux-gnu qemu-user-static.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from compress.kernels.cpu import build
from tests.kernels.cpu.self_check import compiled, passes

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not installed")
@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"{EMULATOR} is not installed")
def test_the_neon_kernels_agree_with_scalar_code(tmp_path: Path) -> None:
    # Static, so that the emulator needs none of the other architecture's libraries.
    program = compiled([COMPILER], [*build.VARIANTS["neon"], "-static"], tmp_path)
    passes([EMULATOR, program], threads=2, rounds=100)
