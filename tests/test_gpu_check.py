"""`examples/gpu_check.py` goes through its motions here: arguments, sections, table, JSON and exit codes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "examples" / "gpu_check.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module."""
    specification = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["gpu_check"] = module  # dataclasses look their module up there
    specification.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr == "gpu_check: torch sees no NVIDIA GPU: run it where there is one, or with --dry-run\n"


def test_a_rehearsal_fills_the_table_and_the_json(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gpu.json"
    assert script.main(["--dry-run", "--tokens", "1,33", "--json", str(file)]) == 0
    told = json.loads(file.read_text())
    assert (told["skipped"], told["failed"], told["card"]) == ([], {}, "rehearsal on the CPU")
    assert {(row["scheme"], row["tokens"]) for row in told["products"]} == {
        (scheme, tokens) for scheme in script.SCHEMES for tokens in (1, 33)
    }
    assert all(row["parity_db"] > script.PARITY_DB for row in told["products"] + told["attention"])
    assert all(row["us"] > 0 and row["gbs"] > 0 and row["share"] > 0 for row in told["products"])
    assert [row["kernels"] for row in told["model"]] == [["reference"], ["reference"]]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rehearsal on the CPU: ") and lines[1].split()[:4] == ["tokens", "parity", "us", "GB/s"]
    assert len(lines) == 2 + 2 * len(script.SCHEMES) + 2 + 2 * 2


def test_time_that_is_up_is_told(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--dry-run", "--schemes", "W8A8", "--tokens", "4", "--seconds", "0"]) == 0
    out = capsys.readouterr().out
    assert "out of time, not measured: W8A8 tiny x 4" in out and "not measured: decode tiny W4A16, batch 1" in out


def test_a_wrong_kernel_and_one_that_fails_are_named(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = script.reference.matmul
    short = ["--dry-run", "--no-model", "--schemes", "W4A16 g64", "--tokens", "4"]

    def wrong(x: Any, prepared: Any) -> Any:
        return right(x, prepared) if x.dtype == torch.float32 else right(x, prepared).roll(1, dims=-1)

    monkeypatch.setattr(script.reference, "matmul", wrong)
    assert script.main(short) == 1
    assert "WRONG: W4A16 g64 tiny x 4 with 4 tokens: " in capsys.readouterr().err

    def failing(x: Any, prepared: Any) -> Any:
        raise RuntimeError("an illegal\naddress")

    monkeypatch.setattr(script.reference, "matmul", failing)
    assert script.main(short) == 1
    assert "FAILED: W4A16 g64 tiny x 4: an illegal address" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--schemes", "W3A16"], ["--tokens", "many"], ["--fast"]])
def test_usage_mistakes(script: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        script.main(["--dry-run", *arguments])
    capsys.readouterr()


def test_what_it_measures_is_what_there_is(script: ModuleType) -> None:
    """Every layer and head that a GPU would be timed on has a binary."""
    from compress.kernels import build
    from compress.kernels.triton import launch

    for scheme in script.SCHEMES.values():
        for shape in script.LAYERS.values():
            assert build.refuses(scheme, torch.bfloat16, "sm_90", shape) is None
    for int8 in (False, True):
        assert launch.attention_refuses(launch.Heads(*script.HEADS, int8), "bf16") is None
