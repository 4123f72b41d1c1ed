"""Checkpoint folders: exact reads in memory of their own, and every broken folder named in one line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from compress.checkpoint.header import encode_header
from compress.errors import InputError


def make(folder: Path, shards: dict[str, dict[str, torch.Tensor]], index: dict[str, Any] | None = None) -> Path:
    """A folder with these shards, a config, and an index of them if there are several (or the one given)."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for name, tensors in shards.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if index is None and len(shards) > 1:
        index = {"weight_map": {tensor: name for name, tensors in shards.items() for tensor in tensors}}
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


ONE = {"model.safetensors": {"a": torch.arange(12.0).reshape(4, 3), "b": torch.arange(3)}}
TWO = {
    "model-00001-of-00002.safetensors": {"a": torch.ones(2)},
    "model-00002-of-00002.safetensors": {"b": torch.zeros(3)},
}


def test_reads_what_the_safetensors_package_reads(tiny_llama: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama)
    wanted = load_file(tiny_llama / "model.safetensors")
    assert checkpoint.config["model_type"] == "llama" and checkpoint.quantization is None
    assert checkpoint.tensors.keys() == wanted.keys()
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in wanted.values())
    for name, tensor in wanted.items():
        assert torch.equal(checkpoint.read(name), tensor)
        assert checkpoint.tensors[name].shape == tuple(tensor.shape)


def test_reads_shards_through_their_index(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make(tmp_path, TWO))
    assert torch.equal(checkpoint.read("a"), torch.ones(2)) and torch.equal(checkpoint.read("b"), torch.zeros(3))


def test_reads_rows(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make(tmp_path, ONE))
    assert torch.equal(checkpoint.read_rows("a", 1, 3), ONE["model.safetensors"]["a"][1:3])
    assert checkpoint.read_rows("a", 4, 4).shape == (0, 3)
    for start, stop in ((-1, 2), (3, 2), (0, 5)):
        with pytest.raises(ValueError, match="no rows"):
            checkpoint.read_rows("a", start, stop)


def test_what_is_read_is_not_the_file(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make(tmp_path, ONE))
    checkpoint.read("a").zero_()
    assert torch.equal(checkpoint.read("a"), ONE["model.safetensors"]["a"])


def test_resident_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    count, nbytes = 64, 8 << 20
    file = make(tmp_path, ONE) / "model.safetensors"
    infos = [TensorInfo(str(i), file, torch.uint8, (nbytes,), 8192 + i * nbytes, nbytes) for i in range(count)]
    file.write_bytes(encode_header(infos, {}, 8192))
    os.truncate(file, 8192 + count * nbytes)  # half a gigabyte, and sparse
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.read("0")
    before, peak = resident_bytes(), 0
    for name in checkpoint.tensors:
        tensor = checkpoint.read(name)
        peak = max(peak, resident_bytes() - before)
        assert tensor.shape == (nbytes,)
    assert peak < count * nbytes / 4  # a few tensors, as the allocator pleases


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make(tmp_path, {"model.safetensors": {"model.norm.weight": torch.ones(2)}}))
    with pytest.raises(InputError, match=r"no tensor 'norm.weight'; did you mean 'model.norm.weight'\?"):
        checkpoint.read("norm.weight")


def test_a_file_cut_after_opening(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make(tmp_path, ONE))
    os.truncate(tmp_path / "model.safetensors", 200)
    with pytest.raises(InputError, match="ends inside tensor 'a'"):
        checkpoint.read("a")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match="cannot be read"):
        checkpoint.read("a")


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def with_pickle(folder: Path) -> None:
    without_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nsystem\n.")


def with_config(text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "config.json").write_text(text)

    return change


def with_index(weight_map: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


def with_index_to_pickle(folder: Path) -> None:
    with_pickle(folder)
    with_index({"a": "pytorch_model.bin"})(folder)


def with_second_file(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    with_index({"a": "other.safetensors", "b": "other.safetensors"})(folder)


def with_shard_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")


def with_no_tensors(folder: Path) -> None:
    save_file({}, folder / "model.safetensors")


def with_index_twice(folder: Path) -> None:
    text = '{"weight_map": {"a": "model.safetensors", "a": "other.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(text)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (without_weights, "holds no weights"),
    "pickle": (with_pickle, "pytorch_model.bin: is a pickle"),
    "empty weights": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "holds 0 bytes"),
    "no tensors": (with_no_tensors, "holds no tensors"),
    "unusual name": (with_shard_name, "holds weights.safetensors but neither"),
    "config missing": (lambda folder: (folder / "config.json").unlink(), "config.json: cannot be read"),
    "config empty": (with_config(""), "config.json: is not valid JSON"),
    "config truncated": (with_config('{"model_type": '), "config.json: is not valid JSON"),
    "config a list": (with_config("[]"), "config.json: is a JSON list"),
    "config without model_type": (with_config("{}"), "field 'model_type' is missing"),
    "config with model_type 1": (with_config('{"model_type": 1}'), "field 'model_type' is 1"),
    "config key twice": (with_config('{"model_type": "a", "model_type": "b"}'), "key 'model_type' is given twice"),
    "nested key twice": (with_config('{"model_type": "a", "x": {"y": 1, "y": 1}}'), "key 'y' is given twice"),
    "quantization_config a list": (with_config('{"model_type": "a", "quantization_config": []}'), "is not an object"),
    "index key twice": (with_index_twice, "index.json: key 'a' is given twice"),
    "index without map": (with_index([]), "field 'weight_map'"),
    "index to numbers": (with_index({"a": 1}), "field 'weight_map'"),
    "index to nothing": (with_index({}), "holds model.safetensors and also an index"),
    "index to a missing shard": (
        with_index({"a": "gone.safetensors"}),
        "names shard 'gone.safetensors', which is missing",
    ),
    "index to another folder": (with_index({"a": "../model.safetensors"}), "not a file of this folder"),
    "index to a pickle": (with_index_to_pickle, "pytorch_model.bin: is a pickle"),
    "index to a missing tensor": (
        with_index({"a": "model.safetensors", "c": "model.safetensors"}),
        "tensor 'c' is not in model.safetensors",
    ),
    "index incomplete": (with_index({"a": "model.safetensors"}), "does not place tensor 'b'"),
    "index beside model.safetensors": (with_second_file, "remove one of them"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_one_line_errors(tmp_path: Path, case: str) -> None:
    change, phrase = BROKEN[case]
    change(make(tmp_path, ONE))
    with pytest.raises(InputError) as caught:
        open_checkpoint(tmp_path)
    message = str(caught.value)
    assert phrase in message and str(tmp_path) in message and "\n" not in message


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such folder"):
        open_checkpoint(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is not a folder"):
        open_checkpoint(tmp_path / "file")


def test_checkpoint_is_a_value(tmp_path: Path) -> None:
    folder = make(tmp_path, ONE)
    assert open_checkpoint(folder) == open_checkpoint(folder)
    assert isinstance(open_checkpoint(str(folder)), Checkpoint)  # type: ignore[arg-type]
