"""lmpress.json: what a checkpoint was made from and how, and a table of its tensors that its shards must agree with.

It holds nothing that differs between two runs of one recipe (no dates, no timings), so that their folders are equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from compress.checkpoint.header import DTYPE_NAMES, TensorInfo
from compress.checkpoint.reader import Checkpoint
from compress.checkpoint.strict_json import read_object
from compress.errors import InputError

NAME = "lmpress.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """The fields of lmpress.json, beside its schema_version.

    recipe: as resolved; recipe_sha256: of that. source, calibration: where the weights and the calibration tokens came
    from, with fingerprints (calibration None: no data was needed). layers: a row per compressed layer, in order.
    tensors: name -> {dtype, shape, sha256}, dtypes as safetensors spells them, sha256 of the bytes. fallbacks, skipped:
    [{name, reason}]. versions: of the packages that took part. size: bytes before and after. phases: a row for each
    stage that cut or trained the whole model, in order.
    """

    recipe: dict[str, Any]
    recipe_sha256: str
    source: dict[str, Any]
    calibration: dict[str, Any] | None
    layers: list[dict[str, Any]]
    tensors: dict[str, Any]
    fallbacks: list[dict[str, Any]]
    skipped: list[dict[str, Any]]
    versions: dict[str, Any]
    size: dict[str, Any]
    phases: list[dict[str, Any]] = field(default_factory=list)


def tensor_table(tensors: Mapping[str, TensorInfo], sha256: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The `tensors` field for these tensors, sorted by name; with the sha256 of their bytes where those are given."""
    table: dict[str, Any] = {}
    for name, info in sorted(tensors.items()):
        table[name] = {"dtype": DTYPE_NAMES[info.dtype], "shape": list(info.shape)}
        if sha256 is not None:
            table[name]["sha256"] = sha256[name]
    return table


def encode(manifest: Manifest) -> str:
    """The text of lmpress.json. Raises ValueError for NaN or infinity, which JSON cannot hold."""
    return json.dumps({"schema_version": SCHEMA_VERSION, **asdict(manifest)}, indent=1, allow_nan=False) + "\n"


def read(folder: Path) -> Manifest:
    """The manifest in `folder`. Raises InputError if it is missing, of another schema, or has a field amiss."""
    file = folder / NAME
    data = read_object(file)
    version = data.pop("schema_version", None)
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{file}: field 'schema_version' is {version!r}, this lmpress reads {SCHEMA_VERSION}: use the version that "
            "wrote it"
        )
    lists = ("layers", "fallbacks", "skipped", "phases")
    kinds = {"recipe_sha256": str, "calibration": dict | None, **dict.fromkeys(lists, list)}
    for one in fields(Manifest):
        if one.name not in data:
            if one.default_factory is not MISSING:  # not in manifests of the first releases
                continue
            raise InputError(f"{file}: field {one.name!r} is missing: compress the model again")
        if not isinstance(data[one.name], kinds.get(one.name, dict)):
            found = type(data[one.name]).__name__
            raise InputError(f"{file}: field {one.name!r} is a JSON {found}: compress the model again")
    return Manifest(**{one.name: data[one.name] for one in fields(Manifest) if one.name in data})


def check(manifest: Manifest, checkpoint: Checkpoint) -> None:
    """Raise InputError unless the manifest's table names the checkpoint's tensors with their dtypes and shapes."""
    file, held = checkpoint.folder / NAME, tensor_table(checkpoint.tensors)
    for name in sorted(manifest.tensors.keys() | held.keys()):
        planned, found = _without_hash(manifest.tensors.get(name)), held.get(name)
        if planned != found:
            raise InputError(
                f"{file}: tensor {name!r} is {_phrase(planned)} there and {_phrase(found)} in the shards: the folder "
                "was changed after it was written, copy it again or compress the model again"
            )


def _without_hash(entry: Any) -> Any:
    return {key: value for key, value in entry.items() if key != "sha256"} if isinstance(entry, dict) else entry


def _phrase(entry: Any) -> str:
    if isinstance(entry, dict) and entry.keys() == {"dtype", "shape"}:
        return f"{entry['dtype']} {entry['shape']}"
    return "absent" if entry is None else repr(entry)
