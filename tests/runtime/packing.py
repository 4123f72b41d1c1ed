"""A checkpoint packed by hand: the slow, obvious way from a folder of plain weights to one of packed weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.checkpoint.quantization_config import build
from compress.formats import format_named
from compress.formats.grid import Grid, Quantized
from compress.formats.scheme import Scheme


def nearest(weight: Tensor, grid: Grid, scale_dtype: torch.dtype = torch.bfloat16) -> Quantized:
    """`weight` [N, K] rounded to the nearest point of a grid that spans each group's extremes."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, grid.groups(columns), -1)
    if grid.symmetric:
        scale = (groups.abs().amax(-1) / grid.maximum).to(scale_dtype)
        zero = torch.zeros_like(scale, dtype=torch.int8)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = ((high - low) / (grid.maximum - grid.minimum)).to(scale_dtype)
        zero = (grid.minimum - low / scale.float()).round().clamp(grid.minimum, grid.maximum).to(torch.int8)
    q = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(grid.minimum, grid.maximum)
    return Quantized(q.view(rows, columns).to(torch.int8), scale, None if grid.symmetric else zero)


def outliers_kept(weight: Tensor, grid: Grid, columns: list[int]) -> Quantized:
    """As `nearest`, with `columns` in 16 bit and zero on the grid."""
    kept = torch.tensor(columns, dtype=torch.int32)
    inside = weight.index_fill(1, kept.long(), 0)
    on_grid = nearest(inside, grid)
    return Quantized(on_grid.q, on_grid.scale, None, kept, weight[:, kept.long()].to(torch.bfloat16))


def write_packed(
    source: Path, folder: Path, scheme: Scheme, scale_dtype: torch.dtype = torch.bfloat16, outliers: int = 0
) -> Path:
    """Copy the model in `source` to `folder` with every projection packed; the first `outliers` columns stay out."""

    def quantize(weight: Tensor) -> Quantized:
        if scheme.threshold is None:
            return nearest(weight, scheme.grid, scale_dtype)
        return outliers_kept(weight, scheme.grid, list(range(outliers)))

    pack_model(source, folder, scheme, quantize, scale_dtype)
    return folder


def pack_model(
    source: Path, folder: Path, scheme: Scheme, quantize: Callable[[Tensor], Quantized], scale_dtype: torch.dtype
) -> list[str]:
    """Copy the model in `source` to `folder`, every projection stored as `quantize` puts it; their names."""
    shutil.copytree(source, folder)
    plain, packed = load_file(folder / "model.safetensors"), {}
    modules = [name.removesuffix(".weight") for name in plain if name.endswith("_proj.weight")]
    for name, tensor in plain.items():
        module = name.removesuffix(".weight")
        if module not in modules:
            packed[name] = tensor
            continue
        stored = format_named(scheme.format).pack(quantize(tensor), scheme.grid)
        packed |= {f"{module}.{suffix}": part for suffix, part in stored.items()}
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = build(dict.fromkeys(modules, scheme), ["lm_head"], scale_dtype)
    (folder / "config.json").write_text(json.dumps(config))
    return modules
