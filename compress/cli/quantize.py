"""`lmpress quantize`: a recipe of one stage, written as flags."""

from __future__ import annotations

from typing import Annotated, Any

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


def quantize(
    model: Model,
    output: Output,
    scheme: Annotated[str, typer.Option(help="A name from `lmpress list schemes`.")] = "W4A16",
    method: Annotated[
        str | None, typer.Option(help="From `lmpress list methods`; default: gptq, and llm_int8 for LLM_INT8.")
    ] = None,
    group_size: Annotated[str | None, typer.Option(help="Columns per scale, or `channel`.")] = None,
    pattern: Annotated[str | None, typer.Option(help="Prune too, by sparsegpt: 2:4.")] = None,
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
    """Quantize a model without a recipe file. Prints the recipe that it runs."""
    body: dict[str, Any] = {"method": method or ("llm_int8" if scheme == "LLM_INT8" else "gptq"), "scheme": scheme}
    if group_size is not None:
        body["group_size"] = int(group_size) if group_size.isdecimal() else group_size
    scope = given(targets=target, ignore=ignore)
    pruning = [] if pattern is None else [{"prune": {"method": "sparsegpt", "pattern": pattern}} | scope]
    document = {
        "model": model,
        "output": output,
        "calibration": given(source=calibration, samples=samples, seqlen=seqlen),
        "stages": [*pruning, {"quantize": body} | scope],
        "evaluate": given(text=text, gates=gate),
    }
    run("quantize", document, Wish(changes, device, restart, dequantize, dry_run, as_json))
