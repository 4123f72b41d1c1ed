"""A recipe written as flags: printed as it would stand in a file, then planned or run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

Model = Annotated[str, typer.Option("--model", help="Model folder.")]
Output = Annotated[str, typer.Option("--output", help="Folder to write.")]
Targets = Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="Only these layers.")]
Ignored = Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="Not these layers.")]
Calibration = Annotated[
    str | None, typer.Option(metavar="SOURCE", help="File, folder or dataset; default: the model writes its own.")
]
Samples = Annotated[int | None, typer.Option(help="Calibration sequences.")]
Length = Annotated[int | None, typer.Option(help="Tokens per sequence.")]
Texts = Annotated[list[str] | None, typer.Option(metavar="FILE", help="Held-out text to evaluate on.")]
Gates = Annotated[list[str] | None, typer.Option(metavar="EXPR", help="Such as 'ppl_ratio<=1.05'.")]


@dataclass(frozen=True)
class Wish:
    """What to do with the recipe. changes: `a.b=c` overrides. dry_run: show the plan alone."""

    changes: Sequence[str] | None
    device: str
    restart: bool
    dequantize: bool
    dry_run: bool
    as_json: bool


def run(name: str, document: dict[str, Any], wish: Wish) -> None:
    """Run the recipe in `document`, which the verb `name` has put together, or show its plan."""
    from compress.recipe import parse, to_yaml

    recipe = parse({"version": 1, **document}, name, wish.changes or ())
    typer.echo(to_yaml(recipe), err=wish.as_json)
    if wish.dry_run:
        from compress.cli.plan import show_plan

        show_plan(recipe, wish.dequantize, wish.as_json)
        return
    from compress.cli.execution import execute
    from compress.pipeline import RunOptions

    execute(recipe, RunOptions(device=wish.device, restart=wish.restart, dequantize=wish.dequantize), wish.as_json)


def given(**values: Any) -> dict[str, Any]:
    """What was given on the command line; the recipe has the defaults for the rest."""
    return {key: value for key, value in values.items() if value is not None}
