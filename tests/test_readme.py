"""The README's commands and Python run as they stand there.

They run in order in one scratch folder where `build/demo/model` is a tiny random model laid out as the demo model is:
128 wide, so that every group size fits, with texts/web.txt and texts/wiki.txt. Nothing in a command is rewritten; `run`
and `quantize` get options behind them that shorten calibration and evaluation, `bench` such that shorten its runs. Of
the shell blocks only lines that begin with `lmpress` are run. A gate may fail on a random model, so exit code 3 passes
where a gate is given.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import SMALL, lmpress, settings
from tests.test_complete import shortened
from tests.tiny import write_model, write_text

README = Path(__file__).parent.parent / "README.md"
SHORTER = {
    "run": settings(*SMALL),
    "quantize": settings(*SMALL),
    "distill": ["--steps", "2", *settings("evaluate.context=64", "evaluate.tokens=256")],
    "bench": ["--prompt", "16", "--new", "4", "--repeat", "2", "--allow-fallback"],
}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return [(found[1], found[2]) for found in BLOCK.finditer(README.read_text(encoding="utf-8"))]


def commands(text: str) -> Iterator[list[str]]:
    """The `lmpress` commands of a shell block, split as a shell would."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True) if "lmpress" in line else []
        if words and words[0] == "lmpress":
            yield words[1:]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the README's commands find themselves in."""
    model = write_model(tmp_path / "build/demo/model", hidden_size=128, intermediate_size=256, head_dim=32)
    (model / "texts").mkdir()
    for name in ("web.txt", "wiki.txt"):
        write_text(model / "texts" / name)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"lmpress_note": "a random model"}))
    (tmp_path / "recipes").symlink_to(README.parent / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_readme_runs(scratch: Path) -> None:
    ran = 0
    for language, text in blocks():
        if language in ("console", "bash", "sh"):
            for words in commands(text):
                short = SHORTER.get(words[0], [])
                if words[0] == "run":
                    short = short + settings(*shortened(words[1], Path("build/demo/model")))
                done = lmpress(*words, *short)
                gated = "--gate" in words or words[0] == "run"
                assert done.code == 0 or (done.code == 3 and gated), f"{shlex.join(words)}: {done.err}"
                ran += 1
        if language == "python":
            paths = {**os.environ, "HF_HUB_OFFLINE": "1"}
            python = subprocess.run(
                [sys.executable, "-c", text], env=paths, capture_output=True, text=True, check=False
            )
            assert python.returncode == 0, f"{text}\n{python.stderr}"
            ran += 1
    assert ran >= 3, "the README shows next to nothing that can be run"
