"""`lmpress prune`: a recipe of one pruning stage, written as flags."""

from __future__ import annotations

from typing import Annotated

import typer

from compress.cli.one_stage import Wish, given, run
from compress.cli.options import DequantizeFlag, Device, DryRun, Json, Restart, Set


def prune(
    model: Annotated[str, typer.Option("--model", help="Model folder.")],
    output: Annotated[str, typer.Option("--output", help="Folder to write.")],
    method: Annotated[str, typer.Option(help="From `lmpress list methods`.")] = "sparsegpt",
    pattern: Annotated[str, typer.Option(help="Kept columns of a group.")] = "2:4",
    target: Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="Only these layers.")] = None,
    ignore: Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="Not these layers.")] = None,
    calibration: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="File, folder or dataset; default: the model writes its own.")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Calibration sequences.")] = None,
    seqlen: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    text: Annotated[list[str] | None, typer.Option(metavar="FILE", help="Held-out text to evaluate on.")] = None,
    gate: Annotated[list[str] | None, typer.Option(metavar="EXPR", help="Such as 'ppl_ratio<=1.05'.")] = None,
    changes: Set = None,
    device: Device = "auto",
    restart: Restart = False,
    dequantize: DequantizeFlag = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Prune a model to 2:4 without a recipe file; kept weights stay in 16 bit. Prints the recipe that it runs."""
    document = {
        "model": model,
        "output": output,
        "calibration": given(source=calibration, samples=samples, seqlen=seqlen),
        "stages": [{"prune": {"method": method, "pattern": pattern}} | given(targets=target, ignore=ignore)],
        "evaluate": given(text=text, gates=gate),
    }
    run("prune", document, Wish(changes, device, restart, dequantize, dry_run, as_json))
