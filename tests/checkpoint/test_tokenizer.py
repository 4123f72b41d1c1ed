"""Tokenizers: loaded offline from the folder, copied whole, and missed in one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from compress.checkpoint.tokenizer import load_tokenizer, tokenizer_files
from compress.errors import InputError


def test_copied_files_tokenize_alike(tiny_llama: Path, tmp_path: Path) -> None:
    files = tokenizer_files(tiny_llama)
    for file in files:
        shutil.copy(file, tmp_path)
    text = "compress, then measure"
    assert load_tokenizer(tmp_path)(text)["input_ids"] == load_tokenizer(tiny_llama)(text)["input_ids"]
    names = {file.name for file in files}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"} <= names
    assert not names & {"config.json", "model.safetensors"}
    assert load_tokenizer(tmp_path).chat_template == load_tokenizer(tiny_llama).chat_template


def test_vocabularies_of_other_kinds_travel(tmp_path: Path) -> None:
    names = ["tokenizer.model", "spiece.model", "qwen.tiktoken", "vocab.json", "merges.txt", "tokenizer.model.v3"]
    for name in (*names, "README.md", "pytorch_model.bin"):
        (tmp_path / name).write_text("")
    assert [file.name for file in tokenizer_files(tmp_path)] == sorted(names)


def test_broken_tokenizers_are_one_line_errors(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    for file in tokenizer_files(tiny_llama):
        shutil.copy(file, tmp_path)
    text = (tmp_path / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(text[: len(text) // 2])
    with pytest.raises(InputError, match="tokenizer.json: is not valid JSON") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_an_unknown_class(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "NoSuchTokenizer"}')
    with pytest.raises(InputError, match="tokenizer cannot be loaded") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
