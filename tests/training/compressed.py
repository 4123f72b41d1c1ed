"""Compressed checkpoints of tiny models, packed by hand: every scheme, without a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint import manifest, open_checkpoint
from compress.checkpoint.manifest import Manifest
from compress.formats.grid import FLOAT_BITS, Quantized
from compress.formats.pattern import Pattern, keep_largest
from compress.formats.scheme import FLOATS, Scheme, pruned, scheme_named
from compress.quantize.scales import Search, nearest
from tests.runtime.packing import pack_model

OUTLIERS = (1, 7, 30)
HALF = Pattern(2, 4)
SCHEMES = {
    "W4A16": scheme_named("W4A16", 32),
    "W4A16 rows": scheme_named("W4A16", "channel"),
    "W4A16_ASYM": scheme_named("W4A16_ASYM", 32),
    "W8A16": scheme_named("W8A16", 32),
    "W8A8": scheme_named("W8A8"),
    "LLM_INT8": scheme_named("LLM_INT8"),
    "2:4": pruned(FLOATS, HALF),
    "W4A16 2:4": pruned(scheme_named("W4A16", 32), HALF),
    "W8A16 2:4": pruned(scheme_named("W8A16", 32), HALF),
    "W8A8 2:4": pruned(scheme_named("W8A8"), HALF),
    "W4A16 4:8": pruned(scheme_named("W4A16", 32), Pattern(4, 8)),
    "W4A16_ASYM 4:8": pruned(scheme_named("W4A16_ASYM", 32), Pattern(4, 8)),
}


@dataclass(frozen=True)
class Folders:
    """A float model and what was made of it."""

    plain: Path
    packed: Path


def on_grid(weight: Tensor, scheme: Scheme, search: Search = "mse") -> Quantized:
    """`weight` [N, K] as `scheme` stores it; a mask keeps the largest, and goes into the result where it is stored."""
    mask = None if scheme.pattern is None else keep_largest(weight.abs(), scheme.pattern)
    weight = weight.float() if mask is None else weight.float() * mask
    stored = mask if scheme.format == "sparse24" else None
    if scheme.grid.bits == FLOAT_BITS:
        return Quantized(weight.to(torch.bfloat16), torch.ones(len(weight), 1), mask=stored)
    if scheme.threshold is None:
        return replace(nearest(weight, scheme.grid, search, torch.bfloat16), mask=stored)
    columns = torch.tensor(OUTLIERS, dtype=torch.int32)
    found = nearest(weight.index_fill(1, columns.long(), 0), scheme.grid, "mse", torch.bfloat16)
    outliers = weight[:, columns.long()].to(torch.bfloat16)
    return replace(found, outlier_columns=columns, outlier_weight=outliers)


def write_compressed(source: Path, folder: Path, scheme: Scheme) -> Path:
    """Copy the model in `source` to `folder` with every projection stored under `scheme`, and a manifest."""
    modules = pack_model(source, folder, scheme, partial(on_grid, scheme=scheme), torch.bfloat16)
    table = manifest.tensor_table(open_checkpoint(folder).tensors)
    layers = [{"name": module, "scheme": scheme.name} for module in modules]
    told = Manifest({}, "", {}, None, layers, table, [], [], {}, {})
    (folder / manifest.NAME).write_text(manifest.encode(told))
    return folder
