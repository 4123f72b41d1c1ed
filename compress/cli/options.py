"""Options that several verbs share, and how a verb prints its one JSON document."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import Annotated, Any

import typer


class CacheType(StrEnum):
    """What the native runtime can keep keys and values in."""

    f32 = "f32"
    bf16 = "bf16"
    int8 = "int8"


class KernelChoice(StrEnum):
    """Which kernels may run."""

    auto = "auto"
    reference = "reference"


Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; everything else goes to stderr.")]
RecipeFile = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A YAML file, or a name from `lmpress list recipes`.")
]
Model = Annotated[str | None, typer.Option("--model", help="Model folder; replaces the recipe's.")]
Output = Annotated[str | None, typer.Option("--output", help="Folder to write; replaces the recipe's.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="A.B=C", help="Change one key, e.g. stages.0.quantize.group_size=32. May be repeated."
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Restart = Annotated[bool, typer.Option("--restart", help="Drop what an earlier run left in the output folder.")]
DequantizeFlag = Annotated[
    bool, typer.Option("--dequantize", help="Accept a model that is quantized already, as the weights it stands for.")
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; by default all there are.")]
KvCache = Annotated[
    CacheType | None,
    typer.Option("--kv-cache", help="Type of cached keys and values; by default what the checkpoint's recipe says."),
]
Kernels = Annotated[
    KernelChoice, typer.Option("--kernels", help="reference: plain torch, without int8 activations in W4A16 and W8A16.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")]


def emit(document: Any) -> None:
    """Print `document` as JSON on stdout."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
