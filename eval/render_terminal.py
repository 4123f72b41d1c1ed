"""A report on the terminal: rich tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compress.eval.table import Table
from compress.eval.tables import report_tables

if TYPE_CHECKING:
    from rich.console import Console


def show_report(report: Mapping[str, Any], console: Console) -> None:
    """Print the tables and notes of `report`."""
    baseline = f" against {report['baseline']}" if report["baseline"] else ""
    console.print(f"{report['model']}{baseline}", style="bold", markup=False, highlight=False)
    show_tables(report_tables(report), console)
    show_notes(report["notes"], console)


def show_tables(tables: Sequence[Table], console: Console) -> None:
    """Print each table: figures to the right, words to the left, marked rows in red."""
    from rich import box
    from rich import table as rich_table
    from rich.text import Text

    for table in tables:
        grid = rich_table.Table(
            title=table.title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, collapse_padding=True
        )
        for index, (column, figures) in enumerate(zip(table.columns, table.figures, strict=True)):
            grid.add_column(column, justify="right" if figures else "left", no_wrap=not index, overflow="fold")
        for index, row in enumerate(table.rows):
            grid.add_row(*map(Text, row), style="bold red" if index in table.failed else None)
        console.print(grid)
        show_notes([table.note] if table.note else [], console, mark="")


def show_notes(notes: Sequence[str], console: Console, mark: str = "note: ") -> None:
    """Print each note behind `mark`, on a line of its own."""
    for note in notes:
        console.print(f"{mark}{note}", style="dim", markup=False, highlight=False)
