"""A report as Markdown, for pull requests and model cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compress.eval.table import Table
from compress.eval.tables import report_tables


def report_markdown(report: Mapping[str, Any]) -> str:
    """The whole report, gates first."""
    baseline = f" against `{report['baseline']}`" if report["baseline"] else ""
    return page(f"Report on `{report['model']}`{baseline}", report_tables(report), report["notes"])


def page(title: str, tables: Sequence[Table], notes: Sequence[str]) -> str:
    """A Markdown page of `tables` and `notes`."""
    parts = [f"# {title}", *(table_markdown(table) for table in tables)]
    if notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {cell(note)}" for note in notes))
    return "\n\n".join(parts) + "\n"


def table_markdown(table: Table) -> str:
    """One table under its heading: figures to the right, words to the left."""
    lines = [
        f"## {table.title}",
        "",
        row_markdown(table.columns),
        row_markdown(["--:" if figures else ":--" for figures in table.figures]),
    ]
    for index, row in enumerate(table.rows):
        lines.append(row_markdown([f"**{cell(text)}**" if index in table.failed else cell(text) for text in row]))
    return "\n".join([*lines, *(["", cell(table.note)] if table.note else [])])


def row_markdown(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cell(text: str) -> str:
    """`text` where neither pipes, emphasis nor angle brackets have a meaning."""
    for character in "\\|*_<>`":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
