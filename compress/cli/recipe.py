"""`lmpress recipe`: check a recipe, show it with every default spelt out, or print the JSON schema."""

from __future__ import annotations

import typer

from compress.cli.options import Json, RecipeFile, Set, emit

app = typer.Typer(no_args_is_help=True, help="Check or show a recipe, or print the schema of recipes.")


@app.command()
def check(recipe: RecipeFile, changes: Set = None, as_json: Json = False) -> None:
    """Check a recipe without a model. Exit code 2 when it is invalid."""
    from compress.recipe import load

    loaded = load(recipe, changes or ())
    if as_json:
        emit({"recipe": recipe, "valid": True, "sha256": loaded.sha256(), "stages": len(loaded.stages)})
    else:
        stages = ", ".join(f"{stage.kind} {stage.method}" for stage in loaded.stages)
        typer.echo(f"{recipe}: valid ({stages})")


@app.command()
def show(recipe: RecipeFile, changes: Set = None, as_json: Json = False) -> None:
    """Print a recipe with every default spelt out."""
    from compress.recipe import load, to_yaml

    loaded = load(recipe, changes or ())
    if as_json:
        emit(loaded.resolved())
    else:
        typer.echo(to_yaml(loaded), nl=False)


@app.command()
def schema(as_json: Json = False) -> None:
    """Print the JSON schema of recipes, every method's settings included (for editors and checkers)."""
    from compress.recipe import json_schema

    emit(json_schema())
