"""`lmpress plan`: what a recipe will do to a model, tensor by tensor, before any weight is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from compress.cli.options import DequantizeFlag, Json, Model, RecipeFile, Set, emit

if TYPE_CHECKING:
    from compress.plan import Row
    from compress.recipe import Recipe

CONTEXT = 4096
BATCH = 1
WIDTH = 140  # of tables in a file or pipe, which no window bounds


def plan(
    recipe: RecipeFile,
    model: Model = None,
    changes: Set = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of context for the key-value cache.")] = CONTEXT,
    batch: Annotated[int, typer.Option(min=1, help="Sequences for the key-value cache.")] = BATCH,
    rows: Annotated[bool, typer.Option("--rows", help="A row per tensor, not one per kind of tensor.")] = False,
    dequantize: DequantizeFlag = False,
    as_json: Json = False,
) -> None:
    """Show what a recipe will do: method, format, kernel and size per tensor; memory and disk that it takes."""
    from compress.recipe import load

    loaded = load(recipe, changes or ()).at(model, None)
    show_plan(loaded, dequantize, as_json, rows=rows, cache=(context, batch))


def show_plan(
    recipe: Recipe, dequantize: bool, as_json: bool, rows: bool = False, cache: tuple[int, int] = (CONTEXT, BATCH)
) -> None:
    """Print the plan of `recipe`. cache: context and batch to size the key-value cache for."""
    from compress.pipeline import foresee
    from compress.plan import summary

    made, phases = foresee(recipe, dequantize)
    if made is None:
        show_phases(recipe, phases, as_json)
        return
    totals = summary(made, *cache)
    totals["notes"] += phases
    if as_json:
        emit({"recipe_sha256": recipe.sha256(), **totals, "rows": [asdict(row) for row in made.rows]})
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("tensor", "shape", "method", "scheme", "format", "kernel", "bits", "MB before", "after"):
        table.add_column(
            heading, overflow="fold", justify="right" if heading in ("bits", "MB before", "after") else "left"
        )
    for count, name, row in [(1, row.name, row) for row in made.rows] if rows else _kinds(made.rows):
        many = f"{name} x{count}" if count > 1 else name
        sizes = (f"{count * size / 1e6:,.1f}" for size in (row.bytes_before, row.bytes_after))
        shape = "x".join(map(str, row.shape))
        table.add_row(many, shape, row.method, row.scheme, row.format, row.kernel, f"{row.bits:.3f}", *sizes)
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table)
    about = " (estimate: outlier columns are found at calibration)" if totals["size_is_estimate"] else ""
    kv = totals["kv_cache"]
    for label, value in (
        ("size", f"{_megabytes(totals['bytes_before'])} -> {_megabytes(totals['bytes_after'])}{about}"),
        ("bits per weight", f"{totals['bits_per_weight']:.3f} ({totals['bits_per_weight_all']:.3f} over all tensors)"),
        ("peak memory", _megabytes(totals["peak_memory_bytes"])),
        ("disk", _megabytes(totals["disk_bytes"])),
        ("calibration", f"{totals['calibration_tokens']:,} tokens"),
        (
            "KV cache",
            f"{totals['kv_bytes_per_token']:,} bytes per token; {_megabytes(kv['bytes'])} for "
            f"{kv['batch']} x {kv['context']} tokens",
        ),
        *(("note", note) for note in totals["notes"]),
    ):
        console.print(f"{label:16} {value}", highlight=False, soft_wrap=True)


def show_phases(recipe: Recipe, phases: list[str], as_json: bool) -> None:
    """Print what a recipe does that compresses nothing, or not yet."""
    from rich.console import Console

    if as_json:
        emit({"recipe_sha256": recipe.sha256(), "notes": phases})
        return
    for line in phases:
        Console().print(line, highlight=False, soft_wrap=True)


def _kinds(rows: Iterable[Row]) -> list[tuple[int, str, Row]]:
    """(how many, name with `*` for the block, one of them) of rows that differ in nothing but the block's number."""
    from compress.eval.tables import layer_kind

    kinds: dict[tuple[object, ...], tuple[int, str, Row]] = {}
    for row in rows:
        name = layer_kind(row.name)[1]
        key = (name, row.shape, row.method, row.scheme, row.format, row.kernel, row.bytes_before, row.bytes_after)
        kinds[key] = (kinds[key][0] + 1 if key in kinds else 1, name, row)
    return [(count, name if count > 1 else row.name, row) for count, name, row in kinds.values()]


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
