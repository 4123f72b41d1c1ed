"""Reports side by side: labels, figures, caveats, and the page."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from compress.errors import InputError
from compress.eval.compare import caveats, comparison, comparison_document, comparison_page, read_reports
from compress.eval.report import figures, to_json


@pytest.fixture
def pair(report: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    other = deepcopy(report)
    other["size"]["bytes"] *= 2
    other["quality"] |= {"ppl": other["quality"]["ppl"] / 2, "ppl_stderr": None}
    return [("small", report), ("large", other)]


def test_labels_are_the_shortest_that_differ(report: dict[str, Any], tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "out", tmp_path / "b" / "out", tmp_path / "c"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "report.json").write_text(to_json(report))
    assert [label for label, _ in read_reports([folders[0]])] == ["out"]
    assert [label for label, _ in read_reports([folders[0], folders[2] / "report.json"])] == ["out", "c"]
    labels = [label for label, _ in read_reports(folders)]
    assert labels[:2] == ["a/out", "b/out"] and labels[2].endswith("/c")
    with pytest.raises(InputError, match="there is no such report"):
        read_reports([tmp_path])


def test_figures_stand_side_by_side(pair: list[tuple[str, dict[str, Any]]]) -> None:
    table = comparison(pair)
    assert table.columns == ("", "small", "large")
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["perplexity"][1] == f"{pair[1][1]['quality']['ppl']:.4g}" and "±" in rows["perplexity"][0]
    assert rows["gates"] == ("1 of 2 failed", "1 of 2 failed")
    assert comparison_document(pair)["reports"][1]["figures"] == figures(pair[1][1])


def test_what_cannot_be_compared_is_said(pair: list[tuple[str, dict[str, Any]]]) -> None:
    assert caveats(pair) == []
    pair[1][1]["quality"]["context"] = 2048
    pair[1][1]["host"]["threads"] = 99
    assert [line.partition(":")[0] for line in caveats(pair)] == [
        "different texts, windows or tokens",
        "different hosts or threads",
    ]


def test_the_page_draws_each_model_and_the_baseline_once(pair: list[tuple[str, dict[str, Any]]]) -> None:
    page = comparison_page(pair)
    drawing = page[page.index("<svg") : page.index("</svg>")]
    assert [drawing.count(f">{label}<") for label in ("small", "large", "baseline")] == [1, 1, 1]
