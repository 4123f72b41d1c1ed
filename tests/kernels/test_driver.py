"""Loading and launching through the real cuda-core, on a stand-in for NVIDIA's driver that tells what it was asked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.core")

ROOT = Path(__file__).parent.parent.parent
STUB = Path(__file__).parent / "stub_driver.c"
CODE = """
import contextlib, types
import torch
from compress.kernels import driver
from compress.kernels.exported import Built, Entry

handle = 0x5550
torch.cuda.current_stream = lambda device: types.SimpleNamespace(cuda_stream=handle, synchronize=lambda: None)
torch.cuda.device = lambda device: contextlib.nullcontext()
torch.cuda.current_device = lambda: 0
arguments = (("x", "*bf16"), ("rows", "i32"), ("global_scratch", "*i8"), ("profile_scratch", "*i8"))
entry = Entry("a.cubin", "a", "sm_90", None, "f", "entry", 96, {shared}, arguments, {{}}, 8, "", "", {{}})
loaded = driver.load(Built(entry, b"machine code\\0"), torch.device("cpu"))
x = torch.zeros(64, dtype=torch.bfloat16)
print(x.data_ptr())
driver.launch(loaded, (3, 2, 1), {{"x": x, "rows": -7}})
handle = 0
driver.launch(loaded, (1, 1, 5), {{"x": None, "rows": 8}})
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the stand-in."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("driver")
    command = [compiler, "-shared", "-fPIC", str(STUB), "-o", str(folder / "libcuda.so.1"), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("shared", [1024, 100_000], ids=["little shared memory", "more than 48 KiB"])
def test_what_the_driver_is_asked(stub: Path, shared: int) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(stub)}
    command = [sys.executable, "-c", CODE.format(shared=shared)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    address = done.stdout.strip()
    asked = done.stderr.splitlines()
    assert asked[:2] == ["load machine code", "kernel entry"]
    # Attribute 8 is the most dynamic shared memory that a block may have.
    assert asked[2:-2] == ([f"attribute 8 of 0x20 is {shared}"] if shared > 48 << 10 else [])
    assert asked[-2:] == [
        f"launch 0x20 grid 3 2 1 block 96 1 1 shared {shared} stream 0x5550: {address} -7",
        # Stream 1 is the driver's name for the default stream, torch's 0.
        f"launch 0x20 grid 1 1 5 block 96 1 1 shared {shared} stream 0x1: 0 8",
    ]
