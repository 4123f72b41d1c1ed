"""lmpress.json: an exact round trip, and every disagreement with the shards or the schema named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.checkpoint import Checkpoint, open_checkpoint
from compress.checkpoint.manifest import NAME, Manifest, check, encode, read, tensor_table
from compress.errors import InputError
from tests.checkpoint.sample import FILES, open_writer, section_tensors


def manifest(tensors: dict[str, Any]) -> Manifest:
    return Manifest(
        recipe={"version": 1, "stages": [{"quantize": {"method": "gptq"}}]},
        recipe_sha256="ab" * 32,
        source={"model": "somewhere", "fingerprint": "cd" * 32},
        calibration=None,
        layers=[{"name": "model.layers.0", "scheme": "W4A16", "error_db": -31.5, "damping": None}],
        tensors=tensors,
        fallbacks=[],
        skipped=[{"name": "lm_head", "reason": "ignored"}],
        versions={"torch": torch.__version__},
        size={"bytes": 10, "bytes_source": 30},
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """A published checkpoint with its manifest, whose table was made before it was published."""
    writer = open_writer(tmp_path / "out", 1)
    writer.write("block 0", section_tensors(0), {})
    writer.write("nothing", {}, {})
    return open_checkpoint(writer.finish(FILES | {NAME: encode(manifest(tensor_table(writer.tensors)))}))


def test_round_trip(checkpoint: Checkpoint) -> None:
    found = read(checkpoint.folder)
    assert found == manifest(tensor_table(checkpoint.tensors))
    assert found.tensors["model.layers.0.weight_scale"] == {"dtype": "BF16", "shape": [13, 1]}
    assert json.loads((checkpoint.folder / NAME).read_text())["schema_version"] == 1
    check(found, checkpoint)


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        encode(replace(manifest({}), layers=[{"error_db": float("nan")}]))


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"shape": [13, 32], "dtype": "I8"}, r"is I8 \[13, 32\] there and I8 \[13, 31\] in the shards"),
        ({"shape": [13, 31], "dtype": "U8"}, r"is U8 \[13, 31\] there and I8 \[13, 31\]"),
        (None, r"is absent there and I8 \[13, 31\]"),
        ("gone", "is 'gone' there"),
    ],
)
def test_disagreement_with_the_shards(checkpoint: Checkpoint, change: Any, phrase: str) -> None:
    found = read(checkpoint.folder)
    changed = found.tensors | {"model.layers.0.weight": change}
    if change is None:
        del changed["model.layers.0.weight"]
    with pytest.raises(InputError, match=rf"lmpress.json: tensor 'model.layers.0.weight' {phrase}"):
        check(replace(found, tensors=changed), checkpoint)


def test_a_tensor_that_no_shard_holds(checkpoint: Checkpoint) -> None:
    found = read(checkpoint.folder)
    extra = found.tensors | {"lm_head.weight": {"dtype": "F32", "shape": [2]}}
    with pytest.raises(InputError, match=r"'lm_head.weight' is F32 \[2\] there and absent in the shards"):
        check(replace(found, tensors=extra), checkpoint)


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"schema_version": 2}, "field 'schema_version' is 2, this lmpress reads 1"),
        ({"layers": {}}, "field 'layers' is a JSON dict"),
        ({"recipe": None}, "field 'recipe' is a JSON NoneType"),
        ({"recipe_sha256": 3}, "field 'recipe_sha256' is a JSON int"),
    ],
)
def test_fields_amiss(checkpoint: Checkpoint, change: dict[str, Any], phrase: str) -> None:
    file = checkpoint.folder / NAME
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(InputError, match=phrase):
        read(checkpoint.folder)


def test_missing_fields_and_files(checkpoint: Checkpoint) -> None:
    file = checkpoint.folder / NAME
    data = json.loads(file.read_text())
    del data["versions"]
    file.write_text(json.dumps(data))
    with pytest.raises(InputError, match="field 'versions' is missing"):
        read(checkpoint.folder)
    file.write_text('{"schema_version": 1, "schema_version": 1}')
    with pytest.raises(InputError, match="key 'schema_version' is given twice"):
        read(checkpoint.folder)
    file.unlink()
    with pytest.raises(InputError, match="lmpress.json: cannot be read"):
        read(checkpoint.folder)
