"""`lmpress demo-model`: a small real model and its texts, out of two installed packages, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compress.cli.options import Json, emit


def demo_model(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; kept if it is already complete.")],
    as_json: Json = False,
) -> None:
    """Write SmolLM2-135M-Instruct as a Hugging Face checkpoint, with calibration and held-out text beside it."""
    from compress.demo_model import build

    written = build(folder)
    if as_json:
        emit(written)
        return
    typer.echo(f"{folder}: {written['model']}, {written['bytes'] / 1e6:.0f} MB")
    for text, size in written["texts"].items():
        typer.echo(f"{folder}/texts/{text}: {size / 1e3:.0f} kB")
    typer.echo(written["note"])
