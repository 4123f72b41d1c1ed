"""`lmpress list`: what there is to choose from."""

from __future__ import annotations

import builtins
from enum import StrEnum
from typing import Annotated

import typer

from compress.cli.options import Json, emit


class Topic(StrEnum):
    methods = "methods"
    schemes = "schemes"
    formats = "formats"
    kernels = "kernels"
    recipes = "recipes"


def list(
    topic: Annotated[Topic, typer.Argument(help="What to list.")],
    as_json: Json = False,
) -> None:
    """List methods, schemes, formats, kernels or recipes."""
    rows = {
        Topic.methods: _methods,
        Topic.schemes: _schemes,
        Topic.formats: _formats,
        Topic.kernels: _kernels,
        Topic.recipes: _recipes,
    }[topic]()
    if as_json:
        emit(rows)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*(key.replace("_", " ") for key in rows[0]))
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console().print(table)


def _cell(value: object) -> str:
    if isinstance(value, builtins.list):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def _methods() -> builtins.list[dict[str, object]]:
    from compress import methods

    found = [(kind, name, methods.find(kind, name)) for kind in methods.KINDS for name in methods.names(kind)]
    return [
        {"kind": kind, "name": name, "needs": sorted(method.NEEDS), "about": methods.summary(method)}
        for kind, name, method in found
    ]


def _schemes() -> builtins.list[dict[str, object]]:
    from compress.formats.scheme import SCHEMES

    return [
        {
            "name": scheme.name,
            "bits": scheme.grid.bits,
            "symmetric": scheme.grid.symmetric,
            "group_size": scheme.grid.group_size or "channel",
            "activation_bits": scheme.activation_bits,
            "threshold": scheme.threshold,
            "format": scheme.format,
        }
        for scheme in SCHEMES.values()
    ]


def _formats() -> builtins.list[dict[str, object]]:
    from compress.formats import FORMATS
    from compress.formats.scheme import SCHEMES
    from compress.methods import summary

    return [
        {
            "name": name,
            "schemes": [scheme.name for scheme in SCHEMES.values() if scheme.format == name],
            "about": summary(module),
        }
        for name, module in FORMATS.items()
    ]


def _kernels() -> builtins.list[dict[str, object]]:
    from compress.formats import FORMATS
    from compress.kernels import cuda, reference
    from compress.kernels.build import HOST, unavailable
    from compress.kernels.cpu import kernel as cpu
    from compress.kernels.driver import unavailable as not_launched
    from compress.methods import summary

    # In the order in which they are tried; a reason where one cannot be had here.
    here = {"cpu": unavailable(HOST), "cuda": not_launched() or _without_gpu(), "reference": None}
    devices = {"cpu": "CPU", "cuda": "NVIDIA GPU", "reference": "any"}
    return [
        {
            "name": name,
            "runs_on": devices[name],
            "formats": builtins.list(FORMATS),
            "here": here[name] or "yes",
            "about": summary(module),
        }
        for name, module in {"cpu": cpu, "cuda": cuda, "reference": reference}.items()
    ]


def _without_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "no GPU"


def _recipes() -> builtins.list[dict[str, object]]:
    from compress.recipe import load, shipped

    rows: builtins.list[dict[str, object]] = []
    for name, path in shipped().items():
        recipe = load(path)
        schemes = [stage.scheme.name for stage in recipe.stages if stage.scheme is not None]
        methods = [stage.method for stage in recipe.stages]
        rows.append({"name": name, "methods": methods, "schemes": schemes, "file": str(path)})
    return rows
