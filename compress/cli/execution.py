"""What `run` and `quantize` share: carry a recipe out, evaluate the result, print both; or print the plan alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from compress.cli.options import emit
from compress.errors import GATE, USAGE, InputError

if TYPE_CHECKING:
    from compress.checkpoint.manifest import Manifest
    from compress.eval.run import Request
    from compress.pipeline import RunOptions
    from compress.recipe import Recipe


def execute(recipe: Recipe, options: RunOptions, as_json: bool) -> None:
    """Run `recipe`, measure the result where it says how, report, and print. Exit code 3 when a gate fails."""
    from compress.cli.progress import watching
    from compress.pipeline import run
    from compress.training.processes import is_main

    request = evaluation(recipe, options.device)  # before hours of work: its mistakes show at once
    with watching() as observer:
        outcome = run(recipe, options, observer)
    if not is_main():
        return
    told = outcome.manifest
    for line in account(told):
        typer.echo(line, err=as_json)
    report = write_report(request, outcome.folder, Path(str(recipe.model)))
    if as_json:
        size = {"size": told.size, "calibration": told.calibration, "fallbacks": told.fallbacks}
        emit({"output": str(outcome.folder), "recipe_sha256": told.recipe_sha256, **size, "report": report})
    else:
        show(report)
        typer.echo(f"{outcome.folder}: finished, {told.size['bytes'] / 1e6:.1f} MB of weights")
    leave_if_failed(report)


def evaluation(recipe: Recipe, device: str) -> Request | None:
    """What the recipe wants measured, or None. Raises InputError for gates, texts and lengths that cannot be."""
    from compress.eval.gates import parse_gate
    from compress.eval.run import Request
    from compress.eval.speed import Bench
    from compress.eval.timing import refuse_too_long
    from compress.pipeline import pick_device

    wanted = recipe.evaluate
    if recipe.output is None or recipe.model is None or not (wanted.text or wanted.gates or wanted.bench):
        return None
    for gate in wanted.gates:
        parse_gate(gate)
    texts = tuple(Path(recipe.expand(text)) for text in wanted.text)
    for text in texts:
        if not text.is_file():
            raise InputError(f"recipe: field 'evaluate.text' is {str(text)!r}: no such file", USAGE)
    timed = wanted.bench
    bench = Bench(tuple(sorted(set(timed.batch))), timed.prompt, timed.new, timed.repeat) if timed else None
    if bench is not None:
        refuse_too_long(Path(recipe.model), bench)
    return Request(
        checkpoint=Path(recipe.output),
        baseline=Path(recipe.model),
        texts=texts,
        context=wanted.context,
        limit=wanted.tokens,
        gates=wanted.gates,
        device=str(pick_device(device)),
        bench=bench,
    )


def account(told: Manifest) -> list[str]:
    """What a run did otherwise than asked, what it left alone, and what it calibrated on: a line each."""
    from compress.eval.tables import by_reason

    count, calibration = len(told.fallbacks), told.calibration
    lines = [f"{count} fallback{'' if count == 1 else 's'}"]
    lines += [f"fallback: {row['name']}: {row['reason']}" for row in told.fallbacks]
    lines += [f"left alone: {name}: {reason}" for name, reason in by_reason(told.skipped)]
    if calibration is None:
        return [*lines, "calibration: none needed"]
    extent = f"{calibration['samples']} x {calibration['seqlen']} tokens"
    lines.append(f"calibration: {extent} from {calibration['source']!r}, seed {calibration['seed']}")
    return lines + [f"calibration: {note}" for note in calibration["notes"]]


def write_report(request: Request | None, folder: Path, model: Path) -> dict[str, Any]:
    """The report of `request`, or of the files alone where nothing is to be measured; written into `folder` as well."""
    from compress.cli.eval import progress_bar
    from compress.eval.run import evaluate, publish, report_on_files

    if request is None:
        report = report_on_files(folder, baseline=model)
    else:
        with progress_bar() as progress:
            report = evaluate(request, progress)
    publish(report, folder)
    return report


def show(report: dict[str, Any]) -> None:
    """Print the tables of a report."""
    from rich.console import Console

    from compress.eval.render_terminal import show_report

    show_report(report, Console())


def leave_if_failed(report: dict[str, Any]) -> None:
    """Name each gate that failed and leave with exit code 3; do nothing if none did."""
    from compress.eval.gates import failures

    failed = failures(report)
    for line in failed:
        typer.secho(line, fg=typer.colors.RED, err=True)
    if failed:
        raise typer.Exit(GATE)
