"""What `run` and `quantize` share: carry a recipe out, evaluate the result, print both; or print the plan alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from compress.cli.options import emit
from compress.errors import GATE, USAGE, InputError

if TYPE_CHECKING:
    from compress.eval.run import Request
    from compress.pipeline import RunOptions
    from compress.recipe import Recipe


def execute(recipe: Recipe, options: RunOptions, as_json: bool) -> None:
    """Run `recipe`, measure the result where it says how, and print. Exit code 3 when a gate fails."""
    from compress.cli.progress import watching
    from compress.pipeline import run

    request = evaluation(recipe, options.device)  # before hours of work: its mistakes show at once
    with watching() as observer:
        outcome = run(recipe, options, observer)
    report = measure(request, outcome.folder) if request else None
    if as_json:
        told = outcome.manifest
        size = {"size": told.size, "calibration": told.calibration, "fallbacks": told.fallbacks}
        emit({"output": str(outcome.folder), "recipe_sha256": told.recipe_sha256, **size, "report": report})
    else:
        show(report)
        typer.echo(f"{outcome.folder}: finished, {outcome.manifest.size['bytes'] / 1e6:.1f} MB of weights")
    leave_if_failed(report)


def evaluation(recipe: Recipe, device: str) -> Request | None:
    """What the recipe wants measured, or None. Raises InputError for gates and texts that cannot be."""
    from compress.eval.gates import parse_gate
    from compress.eval.run import Request
    from compress.pipeline import pick_device

    wanted = recipe.evaluate
    if recipe.output is None or recipe.model is None or not (wanted.text or wanted.gates):
        return None
    for gate in wanted.gates:
        parse_gate(gate)
    texts = tuple(Path(recipe.expand(text)) for text in wanted.text)
    for text in texts:
        if not text.is_file():
            raise InputError(f"recipe: field 'evaluate.text' is {str(text)!r}: no such file", USAGE)
    return Request(
        checkpoint=Path(recipe.output),
        baseline=Path(recipe.model),
        texts=texts,
        context=wanted.context,
        limit=wanted.tokens,
        gates=wanted.gates,
        device=str(pick_device(device)),
    )


def measure(request: Request, folder: Path) -> dict[str, Any]:
    """The report of `request`, written into `folder` as well."""
    from compress.cli.eval import progress_bar
    from compress.eval.run import evaluate, publish

    with progress_bar() as progress:
        report = evaluate(request, progress)
    publish(report, folder)
    return report


def show(report: dict[str, Any] | None) -> None:
    """Print the tables of a report, if there is one."""
    from rich.console import Console

    from compress.eval.render_terminal import show_report

    if report is not None:
        show_report(report, Console())


def leave_if_failed(report: dict[str, Any] | None) -> None:
    """Name each gate that failed and leave with exit code 3; do nothing if none did."""
    from compress.eval.gates import failures

    failed = failures(report) if report else []
    for line in failed:
        typer.secho(line, fg=typer.colors.RED, err=True)
    if failed:
        raise typer.Exit(GATE)
