"""Lean import: the help page costs no torch, and loading a compressed model no transformers."""

from __future__ import annotations

import json
import subprocess
import sys

CPU_SECONDS = 0.5
REPORT = "import json, sys, time; print(json.dumps([sorted(sys.modules), time.process_time()]), file=sys.stderr)"
COMPRESS_SIDE = ("methods", "recipe", "plan", "pipeline", "calibrate", "model", "stats", "cli")


def loaded_after(code: str) -> tuple[set[str], float]:
    """Modules loaded, and seconds of CPU used, by a fresh interpreter that ran `code`."""
    script = f"import atexit\natexit.register(lambda: exec({REPORT!r}))\n{code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    modules, seconds = json.loads(done.stderr.splitlines()[-1])
    return set(modules), seconds


def test_help_needs_neither_torch_nor_transformers() -> None:
    runs = [loaded_after("from compress.cli.app import main; main(['--help'])") for _ in range(3)]
    for modules, _ in runs:
        assert {"torch", "transformers", "datasets", "pydantic", "numpy"} & modules == set()
    assert min(seconds for _, seconds in runs) < CPU_SECONDS


def test_run_side_needs_no_transformers() -> None:
    modules, _ = loaded_after(
        "import compress.runtime.load, compress.runtime.generate, compress.eval.run, compress.texts\n"
        "import compress.kernels.aot"
    )
    assert {"transformers", "typer", "datasets", "accelerate", "matplotlib", "triton"} & modules == set()
    assert {f"compress.{name}" for name in COMPRESS_SIDE} & modules == set()


def test_the_errors_need_nothing() -> None:
    modules, _ = loaded_after("import compress.errors")
    assert {"torch", "numpy", "pydantic"} & modules == set()
