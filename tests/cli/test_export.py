"""`lmpress export` as scripts see it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compress.formats.scheme import scheme_named
from tests.command import lmpress
from tests.runtime.packing import write_packed
from tests.tiny import write_model


@pytest.fixture(scope="module")
def packed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packed(tiny_llama, tmp_path_factory.mktemp("export") / "packed", scheme_named("W4A16", 32))


@pytest.mark.parametrize("to", ["gguf", "dense", "gptq", "awq"])
def test_each_format_is_written_and_told(to: str, packed: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = lmpress("export", str(packed), "--format", to, "--output", str(output), "--json")
    assert (done.code, done.err) == (0, "")
    told = json.loads(done.out)
    assert told["format"] == to and told["bytes"] > 0 and told["tensors"]
    assert told["carried_layers"] == (0 if to == "dense" else 14)
    assert Path(told["output"]) == (output / "model.gguf" if to == "gguf" else output)
    assert (output / ("model.gguf" if to == "gguf" else "config.json")).is_file()
    again = lmpress("export", str(packed), "--format", to, "--output", str(output))
    assert again.code == (1 if to == "gguf" else 0)
    assert ("exists already" in again.err) if to == "gguf" else ("it was there already" in again.out)
    assert lmpress("export", str(packed), "--format", to, "--output", str(output), "--restart").code == 0


def test_words_for_people(packed: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    done = lmpress("export", str(packed), "--format", "gguf", "--output", str(file), "--embeddings", "BF16")
    assert done.code == 0 and file.is_file()
    assert done.out.splitlines()[:2] == [
        "tensors: 2 BF16, 5 F32, 14 Q4_0",
        "carried over unchanged: the integers of 14 linear layers",
    ]
    assert done.out.splitlines()[-1].startswith(f"{file}: finished, ")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--format", "bnb"), "'bnb' is not built yet"),
        (("--format", "ggfu"), "did you mean 'gguf'?"),
        (("--format", "awq", "--type", "F16"), "leave it out"),
        (("--format", "dense", "--embeddings", "F16"), "leave it out"),
        (("--format", "dense", "--type", "Q4_0"), "'Q4_0' is not known"),
        (("--format", "gguf", "--type", "F64"), "'F64' is not known"),
    ],
    ids=["planned", "misspelt", "type", "embeddings", "dense type", "gguf type"],
)
def test_usage_mistakes(options: tuple[str, ...], told: str, packed: Path, tmp_path: Path) -> None:
    done = lmpress("export", str(packed), "--output", str(tmp_path / "out"), *options)
    assert (done.code, done.out) == (2, "") and told in done.err and done.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_family_that_the_decoder_does_not_know(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "gpt_neox", intermediate_size=128)
    done = lmpress("export", str(folder), "--format", "gguf", "--output", str(tmp_path / "out"))
    assert done.code == 1 and "model_type 'gpt_neox'" in done.err and not (tmp_path / "out").exists()
