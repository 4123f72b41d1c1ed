"""`lmpress compare`: reports of several checkpoints side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from compress.cli.options import Json, emit


def compare(
    paths: Annotated[
        list[Path], typer.Argument(metavar="REPORT...", help="report.json files, or folders that hold one.")
    ],
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write comparison.json, .md and .html there.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Set reports side by side."""
    from compress.eval.compare import caveats, comparison, comparison_document, comparison_page, read_reports
    from compress.eval.render_markdown import page
    from compress.eval.run import write_files

    reports = read_reports(paths)
    table, warnings, document = comparison(reports), caveats(reports), comparison_document(reports)
    if report:
        texts = {
            "comparison.json": json.dumps(document, indent=2, ensure_ascii=False) + "\n",
            "comparison.md": page("Side by side", [table], warnings),
            "comparison.html": comparison_page(reports),
        }
        for file in write_files(report, texts):
            typer.echo(f"wrote {file}", err=True)
    if as_json:
        emit(document)
        return
    from rich.console import Console

    from compress.eval.render_terminal import show_notes, show_tables

    console = Console()
    show_tables([table], console)
    show_notes(warnings, console)
