"""`lmpress kernels`: build, list and verify the kernels that travel with a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.options import Json, emit

if TYPE_CHECKING:
    from compress.kernels.build import Wanted

Folder = Annotated[Path, typer.Argument(metavar="CKPT", help="Folder of a checkpoint.")]
Targets = Annotated[
    list[str] | None,
    typer.Option("--target", metavar="NAME", help="host, sm_80, sm_90, sm_100 or gfx942; default: all. Repeatable."),
]

WIDTH = 120  # of tables in a file or pipe, which no window bounds

app = typer.Typer(no_args_is_help=True, help="Build, list or verify the kernels that travel with a checkpoint.")


@app.command()
def build(checkpoint: Folder, target: Targets = None, as_json: Json = False) -> None:
    """Build the kernels that serve a checkpoint's formats into its kernels/ folder, in place of its earlier ones."""
    from compress.cli.eval import progress_bar
    from compress.errors import USAGE, InputError, did_you_mean
    from compress.kernels import build as building
    from compress.kernels import exported

    served = _served(checkpoint)
    for name in target or ():
        if name not in building.TARGETS:
            hint = did_you_mean(name, building.TARGETS) or "."
            raise InputError(f"--target: {name!r} is not known{hint} Known: {', '.join(building.TARGETS)}", USAGE)
    reasons = {name: building.problem(served, name) for name in building.TARGETS if not target}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    wanted = [name for name in building.TARGETS if name in (target or building.TARGETS) and name not in left_out]
    for name, reason in left_out.items():
        typer.echo(f"left out: {name}: {reason}", err=True)
    if not wanted:
        raise InputError(f"{checkpoint}: kernels can be built for no target here: mend one of the reasons above")
    building.check(served, wanted, "--target")
    with progress_bar() as progress:
        built = building.build(served, wanted, progress)
    exported.write(checkpoint, built, wanted)
    if as_json:
        emit({"checkpoint": str(checkpoint), "kernels": _rows(checkpoint), "left_out": left_out})
    else:
        _show(checkpoint)


@app.command(name="list")
def list_(checkpoint: Folder, as_json: Json = False) -> None:
    """List the kernels in a checkpoint, and whether this machine would run them."""
    if as_json:
        emit({"checkpoint": str(checkpoint), "kernels": _rows(checkpoint)})
    else:
        _show(checkpoint)


@app.command()
def verify(checkpoint: Folder, as_json: Json = False) -> None:
    """Check the bytes, the source and the manifest of a checkpoint's kernels. Exit code 1 if anything is amiss."""
    from compress.kernels import exported
    from compress.kernels.build import source_of

    findings = exported.verify(checkpoint, source_of)
    count = len(exported.read_manifest(checkpoint))
    if as_json:
        rows = [finding._asdict() for finding in findings]
        emit({"checkpoint": str(checkpoint), "ok": not findings, "kernels": count, "findings": rows})
    for finding in findings:
        typer.secho(finding.message, fg=typer.colors.RED, err=True)
    if findings:
        raise typer.Exit(1)
    if not as_json:
        typer.echo(f"{checkpoint / exported.FOLDER}: {count} kernels are as they were built, from this lmpress' source")


def _served(checkpoint: Path) -> Wanted:
    """What the kernels of a checkpoint are to serve. An uncompressed one has attention over its cache to gain."""
    from compress.checkpoint import open_checkpoint
    from compress.checkpoint.quantization_config import stored_schemes, stored_shape
    from compress.checkpoint.source import dominant_dtype
    from compress.kernels.build import Wanted

    found = open_checkpoint(checkpoint)
    schemes = stored_schemes(found) if found.quantization else {}
    layers = {name: (scheme, stored_shape(found, name, scheme)) for name, scheme in schemes.items()}
    scales = {name: info for name, info in found.tensors.items() if name.endswith(".weight_scale")}
    return Wanted(layers, dominant_dtype(scales or found.tensors))


def _rows(checkpoint: Path) -> list[dict[str, Any]]:
    from dataclasses import asdict

    from compress.kernels import build as building
    from compress.kernels import exported, trust

    return [
        asdict(entry)
        | {
            "built_here": trust.built_here(entry.sha256),
            "stale": building.source_of(entry) != entry.source_sha256,
        }
        for entry in exported.read_manifest(checkpoint)
    ]


def _show(checkpoint: Path) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table("file", "target", "serves", "KB", "sha256", "runs here", box=SIMPLE_HEAD, pad_edge=False)
    for row in _rows(checkpoint):
        runs = "no: another source" if row["stale"] else "yes: built here" if row["built_here"] else "if trusted"
        size = f"{row['nbytes'] / 1000:.1f}"
        table.add_row(row["file"], row["target"], row["format"] or "all", size, row["sha256"][:12], runs)
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table)
