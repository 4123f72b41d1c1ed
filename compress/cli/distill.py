"""`lmpress distill`: a recipe of one distill stage, written as flags."""

from __future__ import annotations

from typing import Annotated

import typer

from compress.cli.one_stage import Gates, Model, Output, Texts, Wish, given, run
from compress.cli.options import Device, DryRun, Json, Restart, Set


def distill(
    model: Model,
    output: Output,
    teacher: Annotated[str, typer.Option(help="Folder of the model to learn from.")],
    method: Annotated[str, typer.Option(help="A loss, from `lmpress list methods`.")] = "forward_kl",
    data: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="File, folder or dataset; default: the teacher writes its own.")
    ] = None,
    sequences: Annotated[int | None, typer.Option(help="Sequences of training data.")] = None,
    seqlen: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the optimizer.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences per step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="At its peak.")] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Keep the teacher's word on disk, and train from there.")
    ] = False,
    text: Texts = None,
    gate: Gates = None,
    changes: Set = None,
    device: Device = "auto",
    restart: Restart = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Train a student, compressed or not, towards a teacher. Prints the recipe that it runs."""
    body = {
        "method": method,
        "data": given(source=data, sequences=sequences, seqlen=seqlen),
        "teacher": {"model": teacher, "signal": "offline" if offline else "online"},
        "training": given(steps=steps, batch=batch, learning_rate=learning_rate),
    }
    document = {
        "model": model,
        "output": output,
        "stages": [{"distill": body}],
        "evaluate": given(text=text, gates=gate),
    }
    run("distill", document, Wish(changes, device, restart, False, dry_run, as_json))
