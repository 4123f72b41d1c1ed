"""Compressed checkpoints written by hand, so that these tests lean on formats and headers and on no algorithm."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.checkpoint import manifest, open_checkpoint, quantization_config
from compress.checkpoint.manifest import Manifest
from compress.formats import format_named
from compress.formats.grid import Quantized
from compress.formats.scheme import Scheme, scheme_named


def nearest(weight: Tensor, scheme: Scheme, outliers: int) -> Quantized:
    """weight [N, K] rounded onto the scheme's symmetric grid by absmax; its first `outliers` columns kept in 16 bit."""
    rows, columns = weight.shape
    kept = weight[:, :outliers].bfloat16()
    weight = torch.cat([torch.zeros_like(weight[:, :outliers]), weight[:, outliers:]], dim=1)
    grouped = weight.view(rows, scheme.grid.groups(columns), -1)
    scale = (grouped.abs().amax(-1) / scheme.grid.maximum).clamp(min=1e-6).bfloat16()
    q = (grouped / scale[..., None].float()).round().clamp(scheme.grid.minimum, scheme.grid.maximum)
    stored = Quantized(q.view(rows, columns).to(torch.int8), scale)
    if scheme.threshold is None:
        return stored
    return Quantized(stored.q, scale, outlier_columns=torch.arange(outliers, dtype=torch.int32), outlier_weight=kept)


def compress_folder(
    source: Path, target: Path, scheme_name: str, group_size: int | None = None, outliers: int = 0
) -> Path:
    """Write `source` with every projection under the scheme, with a manifest, to `target`."""
    scheme = scheme_named(scheme_name, group_size)
    shutil.copytree(source, target)
    tensors: dict[str, Tensor] = {}
    layers: list[dict[str, Any]] = []
    schemes: dict[str, Scheme] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[name] = tensor
            continue
        stored = format_named(scheme.format).pack(nearest(tensor.float(), scheme, outliers), scheme.grid)
        tensors |= {f"{module}.{suffix}": part for suffix, part in stored.items()}
        schemes[module] = scheme
        row = {
            "name": module,
            "method": "rtn",
            "scheme": scheme.name,
            "error_db": 20.0 + len(layers),
            "error_of": "weight",
        }
        layers.append({**row, "tokens": 0, "outlier_columns": list(range(outliers)), "group_size": group_size})
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization_config.build(schemes, ["lm_head"], torch.bfloat16)
    (target / "config.json").write_text(json.dumps(config | {"lmpress_note": "weights of a test"}))
    write_manifest(target, layers)
    return target


def write_manifest(folder: Path, layers: list[dict[str, Any]]) -> None:
    """lmpress.json for the shards in `folder`, with the sha256 of their tensors."""
    checkpoint = open_checkpoint(folder)
    sha256 = {name: hashlib.sha256(raw_bytes(checkpoint.read(name))).hexdigest() for name in checkpoint.tensors}
    told = Manifest(
        recipe={},
        recipe_sha256=hashlib.sha256(b"recipe").hexdigest(),
        source={"folder": "source"},
        calibration={"source": "self", "samples": 2, "seqlen": 64, "seed": 0, "sha256": "0", "notes": ["a test"]},
        layers=layers,
        tensors=manifest.tensor_table(checkpoint.tensors, sha256),
        fallbacks=[],
        skipped=[{"name": "lm_head", "reason": "left alone"}],
        versions={},
        size={},
    )
    (folder / manifest.NAME).write_text(manifest.encode(told))


def raw_bytes(tensor: Tensor) -> bytes:
    """A tensor's bytes as they are stored."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
