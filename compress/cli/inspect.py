"""`lmpress inspect`: what a checkpoint holds, and whether its bytes are still those that were written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compress.cli.options import Json, emit


def inspect(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="Folder of a checkpoint.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all weights and check their sha256 by lmpress.json.")
    ] = False,
    modules: Annotated[bool, typer.Option("--modules", help="List every module, not one line per kind.")] = False,
    sparsity: Annotated[
        bool, typer.Option("--sparsity", help="Read all weights and tell which follow 2:4 or 4:8.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Tell what is quantized in a checkpoint, and how large it is."""
    from compress.eval.contents import check_bytes, contents, contents_tables
    from compress.eval.sparsity import sparsity as sparse_rows
    from compress.eval.sparsity import sparsity_table

    found = contents(checkpoint)
    verified = check_bytes(checkpoint) if verify else None
    rows = sparse_rows(checkpoint) if sparsity else None
    if as_json:
        emit({**found, "verified_tensors": verified, "sparsity": rows})
        return
    from rich.console import Console

    from compress.eval.render_terminal import show_notes, show_tables

    console = Console()
    tables = contents_tables(found, each_module=modules)
    show_tables([*tables, *([] if rows is None else [sparsity_table(rows)])], console)
    show_notes([found["note"]] if found["note"] else [], console)
    if verified is not None:
        typer.echo(f"verified: {verified} tensors have the sha256 that lmpress.json notes")
