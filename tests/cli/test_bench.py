"""`lmpress bench` as scripts see it: one JSON document, tables, files, and mistakes in one line."""

from __future__ import annotations

import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from compress.cli.bench import batch_sizes
from compress.cli.eval import log_lines_to_stderr
from compress.errors import InputError
from compress.eval.report import read_report
from tests.command import lmpress
from tests.eval.compressed import compress_folder

QUICK = ("--prompt", "8", "--new", "2", "--repeat", "2", "--allow-fallback")


@pytest.fixture(scope="module")
def packed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compress_folder(tiny_llama, tmp_path_factory.mktemp("cli") / "packed", "W4A16", 32)


@pytest.fixture(scope="module")
def benched(packed: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `bench --json --report` did, with its folder."""
    folder = tmp_path_factory.mktemp("report")
    where = ("--baseline", str(tiny_llama), "--batch", "2,1", "--threads", "1", "--report", str(folder), "--json")
    return lmpress("bench", str(packed), *where, *QUICK), folder


def test_json_is_one_document_and_the_estimate_goes_to_stderr(benched: Any) -> None:
    done, folder = benched
    assert done.code == 0
    report = json.loads(done.out)
    assert report == read_report(folder)
    assert [(row["batch"], row["phase"], row["new"]) for row in report["speed"]] == [
        (1, "prefill", 0),
        (1, "decode", 2),
        (2, "prefill", 0),
        (2, "decode", 2),
    ]
    assert all(row["tokens_per_s"] > 0 and row["tokens_per_s_baseline"] > 0 for row in report["speed"])
    assert report["host"]["threads"] == 1
    assert "timing 2 runs of each: about " in done.err
    assert sorted(file.name for file in folder.iterdir()) == ["report.html", "report.json", "report.md", "speed.png"]
    assert all(f"wrote {file}" in done.err for file in folder.iterdir())


def test_tables_without_json(packed: Path) -> None:
    done = lmpress("bench", str(packed), "--batch", "1", *QUICK)
    assert done.code == 0
    assert "decode" in done.out and "medians of 2 runs in turn" in done.out and "baseline" not in done.out


def test_a_fallback_leaves_with_1_and_is_named(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = [{"name": "model.layers.0.mlp.up_proj", "reason": "no compiler"}]
    monkeypatch.setattr("compress.eval.timing.model_fallbacks", lambda model: told)
    strict = lmpress("bench", str(packed), "--prompt", "8", "--new", "2", "--repeat", "1", "--batch", "1")
    assert (strict.code, strict.out) == (1, "")
    assert "model.layers.0.mlp.up_proj fell back to plain torch: no compiler: " in strict.err
    assert "--allow-fallback" in strict.err
    allowed = lmpress("bench", str(packed), "--batch", "1", *QUICK, "--json")
    assert allowed.code == 0 and json.loads(allowed.out)["fallbacks"] == told


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--batch", "1,x"), 2, "--batch: '1,x' is not a list of whole numbers"),
        (("--batch", "0"), 2, "--batch"),
        (("--new", "0"), 2, "--new"),
        (("--threads", "0"), 2, "--threads"),
        (("--prompt", "510", "--new", "3"), 2, "do not fit into the 512 tokens"),
        (("--baseline", "nowhere"), 1, "nowhere"),
        (("--device", "gpu"), 2, "--device"),
        (("--report", __file__ + "/below"), 1, "is no folder to write in"),
    ],
)
def test_mistakes_are_one_line(packed: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    done = lmpress("bench", str(packed), *QUICK, *arguments)
    assert done.code == code and done.out == "" and words in done.err


def test_log_lines_go_where_a_bar_puts_stderr_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before, bar = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(before)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    monkeypatch.setattr(sys, "stderr", bar)
    with log_lines_to_stderr(before):
        logging.getLogger("compress").warning("above the bar")
    logging.getLogger("compress").warning("behind it")
    assert (bar.getvalue(), before.getvalue()) == ("above the bar\n", "behind it\n")


def test_batch_sizes() -> None:
    assert batch_sizes(" 16, 1,4,4") == (1, 4, 16)
    for wrong in ("", "1,,2", "-1", "²"):
        with pytest.raises(InputError):
            batch_sizes(wrong)
