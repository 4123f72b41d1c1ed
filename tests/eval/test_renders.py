"""Renders of a report: the same figures everywhere, and an HTML page that needs nothing but itself."""

from __future__ import annotations

import io
import re
from copy import deepcopy
from html.parser import HTMLParser
from typing import Any

import pytest

from compress.eval.plots import INK, Point, divergence_plot, error_plot, size_plot
from compress.eval.render_html import report_page
from compress.eval.render_markdown import report_markdown
from compress.eval.render_terminal import show_report
from compress.eval.report import build
from compress.eval.table import storage
from compress.eval.tables import layer_kind, report_tables


class Page(HTMLParser):
    """Collects tags, attributes and the visible text of a page, and checks that tags close in order."""

    VOID = frozenset({"meta", "br", "path", "use", "rect"})

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def source(report: dict[str, Any]) -> str:
    return report_page(report)


def terminal(report: dict[str, Any]) -> str:
    from rich.console import Console

    buffer = io.StringIO()
    show_report(report, Console(file=buffer, width=100))
    return buffer.getvalue()


def test_every_table_is_in_every_render(report: dict[str, Any], source: str) -> None:
    page, markdown, printed = Page(source).text, report_markdown(report), terminal(report)
    tables = report_tables(report)
    titles = ["Gates", "Quality", "Cost of the runtime", "Size and memory", "Speed", "Layers"]
    assert [table.title for table in tables][:6] == titles
    for table in tables:
        for row in table.rows:
            assert row[-1] in page and row[-1] in printed
            assert row[-1].replace("|", "\\|") in markdown
    for note in report["notes"]:
        assert note in page and note.split()[0] in printed


def test_the_page_asks_nobody_for_anything(source: str) -> None:
    page = Page(source)
    assert not any(tag in ("script", "link", "img", "iframe", "object", "base") for tag, _, _ in page.attributes)
    references = [value for _, name, value in page.attributes if name in ("href", "src", "xlink:href", "action")]
    assert all(value.startswith("#") for value in references)
    assert all(f'id="{value[1:]}"' in source for value in references)
    assert "@import" not in source and not re.search(r"url\((?!#)", source)
    assert "default-src 'none'" in source


def test_ids_are_unique_over_all_drawings(source: str) -> None:
    ids = [value for _, name, value in Page(source).attributes if name == "id"]
    assert source.count("<svg") == 3
    assert len(ids) == len(set(ids))


def test_drawings_follow_the_theme(source: str) -> None:
    assert "prefers-color-scheme: dark" in source
    drawings = re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL)
    for drawing in drawings:
        assert "var(--ink)" in drawing and INK not in drawing
        assert re.findall(r"#[0-9a-f]{6}\b", re.sub(r'(id|href)="[^"]*"|url\([^)]*\)', "", drawing)) == []


def test_gates_come_first_and_a_failure_is_marked(report: dict[str, Any], source: str) -> None:
    assert source.index('<section class="gates bad">') < source.index("<svg")
    assert "1 of 2 gates failed" in source
    assert re.search(r'<tr class="failed"><td>ppl_ratio &lt; 0.5</td>', source)
    assert "**FAILED**" in report_markdown(report)
    passed = deepcopy(report)
    passed["gates"] = passed["gates"][:1]
    assert '<section class="gates">' in report_page(passed) and "All 1 gates passed" in report_page(passed)


def test_text_from_files_is_escaped(report: dict[str, Any]) -> None:
    hostile = deepcopy(report)
    hostile["notes"] = ["<script>alert(1)</script> | *x*"]
    assert "<script>" not in report_page(hostile)
    assert "\\<script\\>" in report_markdown(hostile) and "\\| \\*x\\*" in report_markdown(hostile)
    hostile["notes"] = ["[red]not markup[/red]"]
    assert "[red]not markup[/red]" in terminal(hostile)


def test_an_empty_report_renders() -> None:
    empty = build({"model": "m", "created": "now"})
    assert "svg" not in Page(report_page(empty)).open
    assert "m" in report_markdown(empty) and "m" in terminal(empty)


def test_the_same_report_gives_the_same_page(report: dict[str, Any], source: str) -> None:
    assert report_page(report) == source


def test_drawings_without_figures_are_left_out() -> None:
    layer = {"name": "a", "error_db": None}
    assert error_plot([layer]) == ""
    assert divergence_plot({"kl_histogram": None}) == ""
    assert size_plot([Point("alone", 1e6, 20.0)]) == ""


def test_kinds_and_units() -> None:
    assert layer_kind("model.layers.12.mlp.up_proj") == (12, "model.layers.*.mlp.up_proj")
    assert layer_kind("lm_head") == (0, "lm_head")
    assert [storage(count) for count in (None, 12, 4_500, 269_060_552, 2.5e12)] == [
        "–",
        "12 B",
        "4.5 kB",
        "269 MB",
        "2,500 GB",
    ]
