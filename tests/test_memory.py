"""Peak memory follows the largest block, not the model, and the plan predicts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.large import write_large
from tests.tiny import VOCABULARY

ROOT = Path(__file__).parent.parent
WIDTH = 1024


def peak(model: Path, output: Path, text: Path) -> dict[str, int]:
    """Peak resident bytes, predicted and seen, of a GPTQ run in a process of its own, and its heap at the start."""
    document = {
        "version": 1,
        "model": str(model),
        "output": str(output),
        "calibration": {"source": str(text), "samples": 2, "seqlen": 512},
        "stages": [{"quantize": {"method": "gptq", "scheme": "W4A16"}}],
    }
    recipe = output.with_suffix(".yaml")
    recipe.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "tests.peak", str(recipe)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory, tiny_text: Path) -> tuple[dict[str, int], dict[str, int]]:
    """A model of two layers, and one of eight: 264 MB of float32 weights more, and next to the blocks nothing large."""
    root = tmp_path_factory.mktemp("memory")
    shallow = write_large(root / "shallow", layers=2, width=WIDTH, vocabulary=VOCABULARY)
    deep = write_large(root / "deep", layers=8, width=WIDTH, vocabulary=VOCABULARY)
    return peak(shallow, root / "a", tiny_text), peak(deep, root / "b", tiny_text)


def test_depth_costs_no_memory(peaks: tuple[dict[str, int], dict[str, int]]) -> None:
    """One in twenty is left to fragments of the heap, which differ from run to run; six blocks would be eight."""
    shallow, deep = peaks
    assert deep["seen"] < 1.05 * shallow["seen"], peaks


def test_planning_leaves_no_holes_in_the_heap(peaks: tuple[dict[str, int], dict[str, int]]) -> None:
    """A walk would fill holes with tensors of its blocks, badly: parameters of a skeleton must not make any."""
    shallow, deep = peaks
    assert deep["heap"] < 1.25 * shallow["heap"], peaks


def test_the_plan_predicts_the_peak(peaks: tuple[dict[str, int], dict[str, int]]) -> None:
    for told in peaks:
        assert 0.75 * told["predicted"] < told["seen"] < 1.15 * told["predicted"], told
