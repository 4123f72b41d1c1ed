"""`lmpress prune`: a recipe of one pruning stage, written as flags."""

from __future__ import annotations

from typing import Annotated

import typer

from compress.cli.one_stage import (
    Calibration,
    Gates,
    Ignored,
    Length,
    Model,
    Output,
    Samples,
    Targets,
    Texts,
    Wish,
    given,
    run,
)
from compress.cli.options import DequantizeFlag, Device, DryRun, Json, Restart, Set


def prune(
    model: Model,
    output: Output,
    method: Annotated[str, typer.Option(help="From `lmpress list methods`.")] = "sparsegpt",
    pattern: Annotated[str, typer.Option(help="Kept columns of a group.")] = "2:4",
    target: Targets = None,
    ignore: Ignored = None,
    calibration: Calibration = None,
    samples: Samples = None,
    seqlen: Length = None,
    text: Texts = None,
    gate: Gates = None,
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
