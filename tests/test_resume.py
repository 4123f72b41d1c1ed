"""A run killed at ten random moments ends in the same bytes as one that nobody touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.tiny import write_model

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks enough that a kill falls between them."""
    return write_model(tmp_path_factory.mktemp("deep") / "model", num_hidden_layers=16)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(("source", "kills"), [("text", 10), ("self", 4)])
def test_kills_leave_no_trace(source: str, kills: int, deep: Path, tiny_text: Path, tmp_path: Path) -> None:
    document = {
        "version": 1,
        "model": str(deep),
        "output": str(tmp_path / "out"),
        "calibration": {"source": "self" if source == "self" else str(tiny_text), "samples": 8, "seqlen": 64},
        "stages": [
            {"transform": {"method": "awq"}},
            {"quantize": {"method": "gptq", "scheme": "W4A16", "group_size": 32}},
            {"quantize": {"method": "llm_int8", "scheme": "LLM_INT8"}, "targets": ["*.self_attn.*"]},
        ],
        "export": {"shard_bytes": 300_000},
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "tests.interrupted", str(recipe), str(kills), "7"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    progress = [int(line) for line in done.stdout.split()]
    assert len(progress) == kills
    between = {lines for lines in progress if lines > 1}
    assert len(between) >= max(1, kills // 5), f"too few kills fell between blocks: {progress}"
    whole, resumed = contents(tmp_path / "out-whole"), contents(tmp_path / "out")
    assert list(resumed) == list(whole)
    assert [name for name in whole if whole[name] != resumed[name]] == []
    assert sum(name.endswith(".safetensors") for name in whole) > 2
    assert len(json.loads(whole["lmpress.json"])["layers"]) == 16 * 7
    assert not (tmp_path / "out.partial").exists()
