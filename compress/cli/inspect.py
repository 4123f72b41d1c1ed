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
    as_json: Json = False,
) -> None:
    """Tell what is quantized in a checkpoint, and how large it is."""
    from compress.eval.contents import check_bytes, contents, contents_tables

    found = contents(checkpoint)
    verified = check_bytes(checkpoint) if verify else None
    if as_json:
        emit({**found, "verified_tensors": verified})
        return
    from rich.console import Console

    from compress.eval.render_terminal import show_notes, show_tables

    console = Console()
    show_tables(contents_tables(found, each_module=modules), console)
    show_notes([found["note"]] if found["note"] else [], console)
    if verified is not None:
        typer.echo(f"verified: {verified} tensors have the sha256 that lmpress.json notes")
