"""`lmpress eval`, `compare` and `inspect` as scripts see them: one JSON document, exit codes, files written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compress.eval.compare import comparison_document, read_reports
from compress.eval.report import read_report, to_json
from tests.command import lmpress
from tests.eval.compressed import compress_folder


@pytest.fixture(scope="module")
def packed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compress_folder(tiny_llama, tmp_path_factory.mktemp("cli") / "packed", "W8A8")


@pytest.fixture(scope="module")
def reported(packed: Path, tiny_llama: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `eval --json --report` did, with its folder."""
    folder = tmp_path_factory.mktemp("report")
    where = ("--baseline", str(tiny_llama), "--text", str(tiny_text), "--context", "64", "--tokens", "256")
    gates = ("--gate", "ppl_ratio <= 1.2", "--gate", "bits_per_weight<=4", "--gate", "recovery>=0.9")
    return lmpress("eval", str(packed), *where, *gates, "--report", str(folder), "--json"), folder


def test_json_is_one_document_and_failed_gates_leave_with_3(reported: Any) -> None:
    done, folder = reported
    assert done.code == 3
    report = json.loads(done.out)
    assert report == read_report(folder)
    assert [gate["passed"] for gate in report["gates"]] == [True, False, False]
    assert "gate failed: bits_per_weight<=4: it is 8." in done.err
    assert "gate failed: recovery>=0.9: no finite figure was measured" in done.err
    assert sorted(file.name for file in folder.iterdir()) == ["report.html", "report.json", "report.md"]


def test_tables_without_json(packed: Path) -> None:
    done = lmpress("eval", str(packed), "--gate", "fallbacks == 0")
    assert done.code == 0
    assert "weights on disk" in done.out and "FAILED" not in done.out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--gate", "kl_men < 1"), 2, "did you mean 'kl_mean'"),
        (("--text", "none.txt"), 1, "none.txt"),
        (("--baseline", "nowhere"), 1, "nowhere"),
        (("--device", "gpu"), 2, "--device"),
        (("--context", "1"), 2, "--context"),
        (("--report", __file__ + "/below"), 1, "is no folder to write in"),
    ],
)
def test_mistakes_are_one_line(packed: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    done = lmpress("eval", str(packed), *arguments)
    assert done.code == code and done.out == "" and words in done.err


def test_compare(reported: Any, tmp_path: Path) -> None:
    folder = reported[1]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "report.json").write_text(to_json(read_report(folder)))
    paths = [str(folder / "report.json"), str(tmp_path / "other")]
    done = lmpress("compare", *paths, "--json", "--report", str(tmp_path / "out"))
    assert done.code == 0
    assert json.loads(done.out) == comparison_document(read_reports([Path(path) for path in paths]))
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "comparison.html",
        "comparison.json",
        "comparison.md",
    ]
    assert "perplexity" in lmpress("compare", paths[0]).out
    missing = lmpress("compare", str(tmp_path))
    assert (missing.code, missing.out) == (1, "") and "report.json" in missing.err


def test_inspect(packed: Path) -> None:
    done = lmpress("inspect", str(packed), "--json")
    assert done.code == 0
    found = json.loads(done.out)
    assert found["verified_tensors"] is None and found["modules"][0]["name"]
    assert "self_attn.q_proj" in lmpress("inspect", str(packed)).out
    assert len(lmpress("inspect", str(packed), "--modules").out.splitlines()) > len(found["modules"])
    verified = json.loads(lmpress("inspect", str(packed), "--verify", "--json").out)
    assert verified["verified_tensors"] == 14 * 2 + 7
    assert "verified: 35 tensors" in lmpress("inspect", str(packed), "--verify").out
