"""Tokenizers as GGUF metadata: what llama.cpp repeats is named for what it does, the rest is refused by reason."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.checkpoint.interop import gguf_file as container
from compress.checkpoint.interop.gguf_vocabulary import read_vocabulary
from compress.errors import InputError
from tests.checkpoint.interop.vocabularies import MAKERS, write_tokenizer

ROWS = 600


@pytest.mark.parametrize("name", MAKERS)
def test_each_is_named_for_what_it_does(name: str, tmp_path: Path) -> None:
    vocabulary = read_vocabulary(write_tokenizer(MAKERS[name](), tmp_path), {"eos_token_id": 7}, ROWS)
    told = vocabulary.metadata
    assert vocabulary.name == name
    assert told["tokenizer.ggml.model"] == container.string("llama" if name == "llama" else "gpt2")
    assert told["tokenizer.ggml.pre"] == container.string("default" if name == "llama" else name)
    assert told["tokenizer.ggml.bos_token_id"] == container.uint32(1)
    assert told["tokenizer.ggml.eos_token_id"] == container.uint32(2)
    assert told["tokenizer.ggml.add_bos_token"] == container.boolean(name == "llama")
    assert told["tokenizer.ggml.add_space_prefix"] == container.boolean(name == "llama")
    assert bool(vocabulary.notes) == (name == "qwen2")


def test_types_of_tokens(tmp_path: Path) -> None:
    tokenizer = MAKERS["gpt-2"]()
    count = tokenizer.get_vocab_size()
    told = read_vocabulary(write_tokenizer(tokenizer, tmp_path), {}, count + 2).metadata["tokenizer.ggml.token_type"]
    types = struct.unpack(f"<{count + 2}i", told[16:])
    assert types[:4] == (3, 3, 3, 1) and types[-3:] == (4, 5, 5)


def test_scores_fall_in_the_order_of_merges(tmp_path: Path) -> None:
    tokenizer = MAKERS["llama"]()
    told = read_vocabulary(write_tokenizer(tokenizer, tmp_path), {}, ROWS).metadata
    scores = dict(enumerate(struct.unpack(f"<{ROWS}f", told["tokenizer.ggml.scores"][16:])))
    of = {text: scores[number] for text, number in tokenizer.get_vocab().items()}
    assert 0 == of["th"] > of["the"] > of["\u2581the"] > of["in"]
    types = struct.unpack(f"<{ROWS}i", told["tokenizer.ggml.token_type"][16:])
    assert types[:4] == (2, 3, 3, 6) and types[-1] == 5


CHANGES: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "unigram": ("gpt-2", lambda found: found.update(model={"type": "Unigram", "vocab": []}), "is Unigram, not BPE"),
    "normalizer": ("gpt-2", lambda found: found.update(normalizer={"type": "Lowercase"}), "normalizer is Lowercase"),
    "step": ("gpt-2", lambda found: found.update(pre_tokenizer={"type": "Whitespace"}), "has the step"),
    "pattern": (
        "qwen2",
        lambda found: found["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="a"),
        "none of",
    ),
    "whole words": ("llama-bpe", lambda found: found["model"].update(ignore_merges=False), "none of those"),
    "suffix": ("gpt-2", lambda found: found["model"].update(end_of_word_suffix="</w>"), "end_of_word_suffix"),
    "a merge missing": ("llama", lambda found: found["model"]["merges"].pop(1), "does not merge"),
    "spaces": ("llama", lambda found: found.update(normalizer=None), "byte fallback"),
    "post-processor": (
        "llama",
        lambda found: found["post_processor"]["single"].append({"SpecialToken": {"id": "<s>", "type_id": 0}}),
        "adds '<s>'",
    ),
    "two of a text": (
        "gpt-2",
        lambda found: found["added_tokens"].append({"id": 500, "content": "<s>", "special": True}),
        "same text",
    ),
    "no row": (
        "gpt-2",
        lambda found: found["added_tokens"].append({"id": ROWS, "content": "x", "special": True}),
        "beyond the 600",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_others_are_refused_by_reason(change: str, tmp_path: Path) -> None:
    name, alter, told = CHANGES[change]
    write_tokenizer(MAKERS[name](), tmp_path)
    found = json.loads((tmp_path / "tokenizer.json").read_text())
    alter(found)
    (tmp_path / "tokenizer.json").write_text(json.dumps(found))
    with pytest.raises(InputError, match=told):
        read_vocabulary(tmp_path, {}, ROWS)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json: is missing"):
        read_vocabulary(tmp_path, {}, ROWS)
    write_tokenizer(MAKERS["gpt-2"](), tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match="names no 'eos_token'"):
        read_vocabulary(tmp_path, {}, ROWS)
    assert read_vocabulary(tmp_path, {"eos_token_id": [2, 1]}, ROWS).metadata["tokenizer.ggml.eos_token_id"] == (
        container.uint32(2)
    )
