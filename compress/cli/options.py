"""Options that several verbs share, and how a verb prints its one JSON document."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; everything else goes to stderr.")]
RecipeFile = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A YAML file, or a name from `lmpress list recipes`.")
]
Model = Annotated[str | None, typer.Option("--model", help="Model folder; replaces the recipe's.")]
Output = Annotated[str | None, typer.Option("--output", help="Folder to write; replaces the recipe's.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="A.B=C", help="Change one key, e.g. stages.0.quantize.group_size=32. May be repeated."
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Restart = Annotated[bool, typer.Option("--restart", help="Drop what an earlier run left in the output folder.")]
DequantizeFlag = Annotated[
    bool, typer.Option("--dequantize", help="Accept a model that is quantized already, as the weights it stands for.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")]


def emit(document: Any) -> None:
    """Print `document` as JSON on stdout."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
