"""Checkpoints and reports that several evaluation tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compress.eval.run import Request, evaluate
from tests.eval.compressed import compress_folder


@pytest.fixture(scope="session")
def packed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny_llama in W4A16, group 32. Read only."""
    return compress_folder(tiny_llama, tmp_path_factory.mktemp("eval") / "packed", "W4A16", 32)


@pytest.fixture(scope="session")
def report(packed: Path, tiny_llama: Path, tiny_text: Path) -> dict[str, Any]:
    """The report of `packed` against tiny_llama, with one gate that passes and one that fails. Read only."""
    gates = ("top1_agreement >= 0", "ppl_ratio < 0.5")
    request = Request(packed, tiny_llama, (tiny_text,), context=64, limit=640, gates=gates, seconds=0.2)
    return evaluate(request)
