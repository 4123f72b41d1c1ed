"""`lmpress quantize`: a recipe of one stage, written as flags."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from compress.cli.options import DequantizeFlag, Device, DryRun, Json, Restart, Set


def quantize(
    model: Annotated[str, typer.Option("--model", help="Model folder.")],
    output: Annotated[str, typer.Option("--output", help="Folder to write.")],
    scheme: Annotated[str, typer.Option(help="A name from `lmpress list schemes`.")] = "W4A16",
    method: Annotated[
        str | None, typer.Option(help="From `lmpress list methods`; default: gptq, and llm_int8 for LLM_INT8.")
    ] = None,
    group_size: Annotated[str | None, typer.Option(help="Columns per scale, or `channel`.")] = None,
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
    from compress.recipe import parse, to_yaml

    body: dict[str, Any] = {"method": method or ("llm_int8" if scheme == "LLM_INT8" else "gptq"), "scheme": scheme}
    if group_size is not None:
        body["group_size"] = int(group_size) if group_size.isdecimal() else group_size
    stage: dict[str, Any] = {"quantize": body} | _given(targets=target, ignore=ignore)
    document = {
        "version": 1,
        "model": model,
        "output": output,
        "calibration": _given(source=calibration, samples=samples, seqlen=seqlen),
        "stages": [stage],
        "evaluate": _given(text=text, gates=gate),
    }
    recipe = parse(document, "quantize", changes or ())
    typer.echo(to_yaml(recipe), err=as_json)
    if dry_run:
        from compress.cli.plan import show_plan

        show_plan(recipe, dequantize, as_json)
        return
    from compress.cli.execution import execute
    from compress.pipeline import RunOptions

    execute(recipe, RunOptions(device=device, restart=restart, dequantize=dequantize), as_json)


def _given(**values: Any) -> dict[str, Any]:
    """What was given on the command line; the recipe has the defaults for the rest."""
    return {key: value for key, value in values.items() if value is not None}
