"""`lmpress eval`: measure a checkpoint, alone or against a baseline, and hold the figures against gates."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TextIO

import typer

from compress.cli.options import Device, Json, KernelChoice, Kernels, KvCache, Threads, emit


def eval(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="Folder of the checkpoint to measure.")],
    baseline: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the model to compare with, usually the source.")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Held-out UTF-8 text. May be repeated.")
    ] = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens per window; windows do not overlap.")] = 512,
    tokens: Annotated[int | None, typer.Option(min=1, help="Use at most about this many tokens of text.")] = None,
    gate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EXPR", help="A bound like 'ppl_ratio<=1.05'; exit code 3 when it fails. May be repeated."
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write report.json, report.md and report.html there.")
    ] = None,
    kv_cache: KvCache = None,
    threads: Threads = None,
    kernels: Kernels = KernelChoice.auto,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure quality, size, memory and speed of a checkpoint."""
    from compress.cli.execution import leave_if_failed, show
    from compress.eval.run import Request, evaluate, publish, refuse_unwritable
    from compress.pipeline import pick_device
    from compress.runtime.load import Execution

    if report is not None:
        refuse_unwritable(report)
    where = str(pick_device(device))
    texts, gates = tuple(text or ()), tuple(gate or ())
    how = Execution(kernels, kv_cache, threads)
    request = Request(checkpoint, baseline, texts, context, limit=tokens, gates=gates, device=where, execution=how)
    with progress_bar() as progress:
        measured = evaluate(request, progress)
    for file in publish(measured, report) if report else ():
        typer.echo(f"wrote {file}", err=True)
    if as_json:
        emit(measured)
    else:
        show(measured)
    leave_if_failed(measured)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A callback that shows (stage, done, total) as a bar on stderr, and nothing where that is not a terminal.

    The bar is redrawn when it is told something and never by itself: that would take time from what is being timed.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    before = sys.stderr
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal)
    with bar, log_lines_to_stderr(before):
        task = bar.add_task("loading", total=None)
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total, refresh=True)


@contextmanager
def log_lines_to_stderr(before: TextIO) -> Iterator[None]:
    """What is logged to `before` goes to sys.stderr as it is now: a bar puts something there that prints above it."""
    handlers = [one for one in logging.getLogger().handlers if isinstance(one, logging.StreamHandler)]
    moved = [one for one in handlers if one.stream is before and one.setStream(sys.stderr)]
    try:
        yield
    finally:
        for handler in moved:
            handler.setStream(before)
