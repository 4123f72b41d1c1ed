"""`lmpress compare`: reports of several checkpoints side by side."""

from __future__ import annotations

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
    from compress.eval import compare as side_by_side
    from compress.eval.render_markdown import page
    from compress.eval.run import write_files

    reports = side_by_side.read_reports(paths)
    table, caveats = side_by_side.comparison(reports), side_by_side.caveats(reports)
    if report:
        texts = {
            "comparison.json": side_by_side.comparison_json(reports),
            "comparison.md": page("Side by side", [table], caveats),
            "comparison.html": side_by_side.comparison_page(reports),
        }
        for file in write_files(report, texts):
            typer.echo(f"wrote {file}", err=True)
    if as_json:
        emit(side_by_side.comparison_document(reports))
        return
    from rich.console import Console

    from compress.eval.render_terminal import show_notes, show_tables

    console = Console()
    show_tables([table], console)
    show_notes(caveats, console)
