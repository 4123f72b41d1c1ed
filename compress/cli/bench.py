"""`lmpress bench`: prefill and decoding speed of a checkpoint, beside its baseline's and the memory's limit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compress.cli.options import Device, Json, KvCache, Threads, emit


def bench(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="Folder of the checkpoint to time.")],
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the model to time in turn, usually the source."),
    ] = None,
    batch: Annotated[str, typer.Option(metavar="LIST", help="Sequences side by side, e.g. 1,4,16.")] = "1,4,16",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 512,
    new: Annotated[int, typer.Option(min=1, help="Tokens decoded behind each prompt.")] = 128,
    threads: Threads = None,
    kv_cache: KvCache = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each; medians and quartiles are told.")] = 5,
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Time layers on the reference kernel too, and name them.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write report.json, .md, .html and speed.png there.")
    ] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure the speed of prefill and decoding."""
    from compress.cli.eval import progress_bar
    from compress.cli.execution import show
    from compress.eval.bench import BenchRequest, publish_bench, run_bench
    from compress.eval.run import refuse_unwritable
    from compress.eval.speed import Bench
    from compress.pipeline import pick_device
    from compress.runtime.load import Execution

    plan = Bench(batch_sizes(batch), prompt, new, repeat)
    if report is not None:
        refuse_unwritable(report)
    how = Execution(kv_cache=kv_cache, threads=threads)
    request = BenchRequest(checkpoint, baseline, plan, allow_fallback, str(pick_device(device)), how)
    with progress_bar() as progress:
        measured = run_bench(request, progress)
    for file in publish_bench(measured, report) if report else ():
        typer.echo(f"wrote {file}", err=True)
    if as_json:
        emit(measured)
    else:
        show(measured)


def batch_sizes(text: str) -> tuple[int, ...]:
    """The numbers of a list such as 1,4,16, in order. Raises InputError for anything else."""
    from compress.errors import USAGE, InputError

    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and int(word) for word in words):
        raise InputError(f"--batch: {text!r} is not a list of whole numbers from 1 up: write it like 1,4,16", USAGE)
    return tuple(sorted({int(word) for word in words}))
