"""Inspection: what the files say of a checkpoint, and bytes held against their hashes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from compress.checkpoint import open_checkpoint
from compress.errors import InputError
from compress.eval.contents import check_bytes, contents, contents_tables
from tests.tiny import write_model


def test_contents_of_a_compressed_checkpoint(packed: Path) -> None:
    found = json.loads(json.dumps(contents(packed)))
    assert (found["model_type"], found["tied_embeddings"], found["kv_bytes_per_token"]) == ("llama", False, 256)
    by_name = {module["name"]: module for module in found["modules"]}
    layer = by_name["model.layers.1.mlp.down_proj"]
    assert (layer["scheme"], layer["group_size"], layer["format"], layer["weights"]) == (
        "W4A16",
        32,
        "pack-quantized",
        8192,
    )
    assert by_name["lm_head.weight"]["scheme"] is None and by_name["lm_head.weight"]["format"] == "bfloat16"
    assert found["parameters"] == sum(module["weights"] for module in found["modules"])


def test_modules_are_listed_by_kind_or_one_by_one(packed: Path) -> None:
    found = contents(packed)
    kinds = contents_tables(found)[1]
    assert next(row for row in kinds.rows if "down_proj" in row[0])[:4] == (
        "mlp.down_proj",
        "2",
        "W4A16 g32",
        "pack-quantized",
    )
    assert len(contents_tables(found, each_module=True)[1].rows) == len(found["modules"])


def test_an_uncompressed_and_a_tied_model(tmp_path: Path) -> None:
    found = contents(write_model(tmp_path / "tied", tie_word_embeddings=True))
    assert found["tied_embeddings"] is True
    assert found["quantization"] == "not quantized"
    assert found["bits_per_weight_all"] == 16.0
    assert found["recipe_sha256"] is None


@pytest.mark.parametrize("tied", [False, True])
def test_an_output_layer_of_any_name_counts(tied: bool, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "gpt_neox", tie_word_embeddings=tied)
    assert ("embed_out.weight" in open_checkpoint(folder).tensors) == (not tied)
    assert contents(folder)["tied_embeddings"] is tied


def test_verify_reads_every_byte(packed: Path, tmp_path: Path) -> None:
    assert check_bytes(packed) == len(open_checkpoint(packed).tensors)
    folder = tmp_path / "flipped"
    shutil.copytree(packed, folder)
    info = open_checkpoint(folder).tensors["model.layers.1.mlp.up_proj.weight_scale"]
    with info.file.open("r+b") as file:
        file.seek(info.offset + info.nbytes - 1)
        last = file.read(1)[0]
        file.seek(info.offset + info.nbytes - 1)
        file.write(bytes([last ^ 1]))
    contents(folder)  # headers alone cannot tell
    with pytest.raises(InputError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight_scale' has not the sha256"):
        check_bytes(folder)


def test_verify_needs_a_manifest_with_hashes(tiny_llama: Path, packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(packed, folder)
    told = json.loads((folder / "lmpress.json").read_text())
    del told["tensors"]["lm_head.weight"]["sha256"]
    (folder / "lmpress.json").write_text(json.dumps(told))
    for each in (folder, tiny_llama):
        with pytest.raises(InputError, match="no sha256"):
            check_bytes(each)


def test_a_broken_folder_is_one_line(packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(packed, folder)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-10])
    with pytest.raises(InputError):
        contents(folder)
