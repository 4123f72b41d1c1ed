"""`lmpress quantize`: a recipe of one stage, written as flags."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from compress.cli.one_stage import Wish, given, run
from compress.cli.options import DequantizeFlag, Device, DryRun, Json, Restart, Set


def quantize(
    model: Annotated[str, typer.Option("--model", help="Model folder.")],
    output: Annotated[str, typer.Option("--output", help="Folder to write.")],
    scheme: Annotated[str, typer.Option(help="A name from `lmpress list schemes`.")] = "W4A16",
    method: Annotated[
        str | None, typer.Option(help="From `lmpress list methods`; default: gptq, and llm_int8 for LLM_INT8.")
    ] = None,
    group_size: Annotated[str | None, typer.Option(help="Columns per scale, or `channel`.")] = None,
    pattern: Annotated[str | None, typer.Option(help="Prune too, by sparsegpt: 2:4.")] = None,
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
