"""What a checkpoint holds, told from its files alone: schemes, bits, ties, sizes, and whether its bytes are right."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from compress.checkpoint.quantization_config import describe
from compress.errors import InputError
from compress.eval.size import ModuleSize, bits_per_weight, kv_bytes_of, measure_size, vocabulary_tables
from compress.eval.subject import open_stored, read_manifest
from compress.eval.table import NOT_MEASURED, Table, number, storage
from compress.eval.tables import in_block, layer_kind

HASHED_AT_ONCE = 1 << 20
Kind = tuple[str, str | None, int | None, str]  # name, scheme, group size, format


def contents(folder: Path) -> dict[str, Any]:
    """Plain values about the checkpoint in `folder`; no weight is read. Raises InputError for a broken folder."""
    stored = open_stored(folder)
    checkpoint, manifest = stored.checkpoint, stored.manifest
    size = measure_size(checkpoint, stored.schemes)
    return {
        "model": str(folder),
        "model_type": checkpoint.config["model_type"],
        "quantization": describe(checkpoint.config),
        "parameters": sum(module.weights for module in size.modules),
        "bytes": size.file_bytes,
        "bits_per_weight": size.bits_per_weight,
        "bits_per_weight_all": size.bits_per_weight_all,
        "kv_bytes_per_token": kv_bytes_of(checkpoint),
        "tied_embeddings": bool(checkpoint.config.get("tie_word_embeddings")) or len(vocabulary_tables(size)) == 1,
        "recipe_sha256": manifest.recipe_sha256 if manifest else None,
        "source": manifest.source if manifest else None,
        "calibration": manifest.calibration if manifest else None,
        "fallbacks": manifest.fallbacks if manifest else [],
        "skipped": manifest.skipped if manifest else [],
        "note": checkpoint.config.get("lmpress_note"),
        "modules": [_module(module, checkpoint) for module in size.modules],
    }


def _module(module: ModuleSize, checkpoint: Checkpoint) -> dict[str, Any]:
    scheme = module.scheme
    stored = scheme.format if scheme else str(checkpoint.tensors[module.name].dtype).removeprefix("torch.")
    return {
        "name": module.name,
        "scheme": scheme.name if scheme else None,
        "group_size": scheme.grid.group_size if scheme else None,
        "format": stored,
        "weights": module.weights,
        "bytes": module.nbytes,
        "bits_per_weight": bits_per_weight((module,)),
    }


def check_bytes(folder: Path) -> int:
    """Read every tensor's bytes and hold their sha256 against the manifest; returns how many were checked.

    Raises InputError for a checkpoint without a manifest or without hashes in it, and for a tensor that differs.
    """
    checkpoint = open_checkpoint(folder)
    manifest = read_manifest(checkpoint)
    hashes = {name: entry.get("sha256") for name, entry in manifest.tensors.items()} if manifest else {}
    if not hashes or None in hashes.values():
        raise InputError(
            f"{folder / 'lmpress.json'}: notes no sha256 of tensors: --verify needs a folder that lmpress wrote"
        )
    for name, wanted in hashes.items():
        info = checkpoint.tensors[name]
        if sha256_of(info) != wanted:
            raise InputError(f"{info.file}: tensor {name!r} has not the sha256 that lmpress.json notes: copy it again")
    return len(hashes)


def sha256_of(info: TensorInfo) -> str:
    """The sha256 of a tensor's stored bytes, a megabyte in memory at a time."""
    found, left = hashlib.sha256(), info.nbytes
    with info.file.open("rb") as file:
        file.seek(info.offset)
        while left and (chunk := file.read(min(left, HASHED_AT_ONCE))):
            found.update(chunk)
            left -= len(chunk)
    return found.hexdigest()


def contents_tables(found: Mapping[str, Any], each_module: bool = False) -> list[Table]:
    """Totals, then modules: one row per kind (the same module in every block), or per module."""
    totals = (
        ("architecture", found["model_type"]),
        ("quantization", found["quantization"]),
        ("parameters", f"{found['parameters']:,}"),
        ("weights on disk", storage(found["bytes"])),
        ("bits per weight, compressed layers", number(found["bits_per_weight"])),
        ("bits per weight, whole model", number(found["bits_per_weight_all"])),
        ("key-value cache per token", storage(found["kv_bytes_per_token"])),
        ("embedding and output head", "one tensor" if found["tied_embeddings"] else "apart"),
        ("fallbacks", str(len(found["fallbacks"]))),
        ("recipe sha256", (found["recipe_sha256"] or "no manifest")[:16]),
    )
    kinds: dict[Kind, list[Mapping[str, Any]]] = {}
    for module in found["modules"]:
        kind = module["name"] if each_module else in_block(layer_kind(module["name"])[1])
        kinds.setdefault((kind, module["scheme"], module["group_size"], module["format"]), []).append(module)
    columns = ("modules", "n", "scheme", "format", "bits", "stored")
    rows = tuple(_kind_row(key, members) for key, members in kinds.items())
    return [Table(found["model"], ("", ""), totals), Table("Modules", columns, rows)]


def _kind_row(key: Kind, members: list[Mapping[str, Any]]) -> tuple[str, ...]:
    kind, scheme, group, stored = key
    nbytes, weights = sum(module["bytes"] for module in members), sum(module["weights"] for module in members)
    named = f"{scheme} {f'g{group}' if group else 'channel'}" if scheme else NOT_MEASURED
    bits = number(8 * nbytes / max(1, weights))
    return (kind.removesuffix(".weight"), str(len(members)), named, stored, bits, storage(nbytes))
