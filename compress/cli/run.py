"""`lmpress run`: carry out a recipe."""

from __future__ import annotations

from compress.cli.options import DequantizeFlag, Device, DryRun, Json, Model, Output, RecipeFile, Restart, Set


def run(
    recipe: RecipeFile,
    model: Model = None,
    output: Output = None,
    changes: Set = None,
    device: Device = "auto",
    restart: Restart = False,
    dequantize: DequantizeFlag = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Compress a model by a recipe. The same command resumes a run that was interrupted."""
    from compress.recipe import load

    loaded = load(recipe, changes or ()).at(model, output)
    if dry_run:
        from compress.cli.plan import show_plan

        show_plan(loaded, dequantize, as_json)
        return
    from compress.cli.execution import execute
    from compress.pipeline import RunOptions

    execute(loaded, RunOptions(device=device, restart=restart, dequantize=dequantize), as_json)
