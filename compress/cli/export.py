"""`lmpress export`: a checkpoint in the layout of another tool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from compress.cli.options import Json, Restart, emit
from compress.errors import USAGE, InputError, did_you_mean

FORMATS = ("gguf", "dense", "compressed-tensors", "gptq", "awq")
PLANNED = ("bnb",)
AUTO = "auto"


def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="Folder of a checkpoint.")],
    to: Annotated[str, typer.Option("--format", metavar="FORMAT", help=f"One of {', '.join(FORMATS)}.")],
    output: Annotated[Path, typer.Option("--output", help="Folder to write; for gguf a file where it ends in .gguf.")],
    kind: Annotated[
        str,
        typer.Option(
            "--type",
            metavar="TYPE",
            help="gguf: Q4_0, Q8_0, F16, BF16, F32, or auto for what holds each layer as it is. dense: F32, F16, BF16, "
            "or auto for the model's own.",
        ),
    ] = AUTO,
    embeddings: Annotated[
        str, typer.Option(metavar="TYPE", help="gguf: of embedding and head; auto is Q8_0 beside Q4_0 and Q8_0.")
    ] = AUTO,
    restart: Restart = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint for llama.cpp, for loaders of compressed-tensors, GPTQ or AWQ, or with plain float weights."""
    from compress.checkpoint import manifest, open_checkpoint
    from compress.checkpoint.interop import awq, compressed_tensors, dense, gguf, gptq
    from compress.checkpoint.quantization_config import stored_schemes
    from compress.cli.eval import progress_bar

    refuse_options(to, kind, embeddings)
    source = open_checkpoint(checkpoint)
    if (source.folder / manifest.NAME).exists():
        manifest.check(manifest.read(source.folder), source)
    schemes = stored_schemes(source)
    with progress_bar() as bar:
        progress = in_megabytes(bar)
        if to == "gguf":
            from compress.runtime.config import Unsupported
            from compress.runtime.load import known_config

            shape = known_config(source)
            if isinstance(shape, Unsupported):
                raise InputError(f"{checkpoint}: cannot be put into a GGUF file: {shape}: export it as 'dense' instead")
            options = gguf.Options(kind, embeddings, replace=restart)
            exported = gguf.export(source, schemes, shape, output, options, progress)
        elif to == "dense":
            exported = dense.export(source, schemes, output, kind, restart, progress)
        else:
            layouts = {"compressed-tensors": compressed_tensors, "gptq": gptq, "awq": awq}
            exported = layouts[to].export(source, schemes, output, restart, progress)
    if as_json:
        emit(exported.document())
        return
    for line in exported.lines():
        typer.echo(line)
    typer.echo(f"{exported.output}: finished, {exported.nbytes / 1e6:.1f} MB")


def refuse_options(to: str, kind: str, embeddings: str) -> None:
    """Raise InputError for a format that there is not, and for an option that the format has no use for."""
    if to in PLANNED:
        raise InputError(f"--format: {to!r} is not built yet: give one of {', '.join(FORMATS)}", USAGE)
    if to not in FORMATS:
        raise InputError(f"--format: {to!r} is not known{did_you_mean(to, FORMATS)} Known: {', '.join(FORMATS)}", USAGE)
    if kind != AUTO and to not in ("gguf", "dense"):
        raise InputError(f"--type: {kind!r} given, but {to} carries the integers over as they are: leave it out", USAGE)
    if embeddings != AUTO and to != "gguf":
        raise InputError(f"--embeddings: {embeddings!r} given, but only gguf chooses their type: leave it out", USAGE)


def in_megabytes(bar: Callable[[str, int, int], None]) -> Callable[[str, int, int], None]:
    """A bar for progress that is told in bytes."""
    return lambda stage, done, total: bar(f"{stage}, MB", done // 1_000_000, total // 1_000_000)
