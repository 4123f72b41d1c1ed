"""`lmpress generate`: text as it is written, one JSON document, chat, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from compress.cli.generate import pieces
from compress.runtime.generate import Sampling, generate, stop_tokens
from compress.runtime.load import load_model
from tests.command import lmpress
from tests.tiny import byte_tokenizer


def test_text_streams_and_json_holds_it(tiny_llama: Path) -> None:
    arguments = ("generate", str(tiny_llama), "--prompt", "a press", "--max-new", "12")
    tokenizer = byte_tokenizer()
    prompt = tokenizer("a press").input_ids
    new = list(generate(load_model(tiny_llama), prompt, 12, Sampling(), stop_tokens(tiny_llama)))
    want = tokenizer.decode(new, skip_special_tokens=True)
    shown = lmpress(*arguments)
    assert (shown.code, shown.out) == (0, want + "\n")
    assert shown.err.startswith(f"7 + {len(new)} tokens in ")
    told = json.loads(lmpress(*arguments, "--json").out)
    assert told.pop("seconds") > 0
    assert [name.partition("-")[0] for name in told.pop("kernels")] == ["cpu"]
    assert told == {
        "model": str(tiny_llama),
        "engine": "lmpress",
        "notes": [],
        "fallbacks": [],
        "prompt_tokens": 7,
        "new_tokens": len(new),
        "text": want,
        "seed": 0,
    }


def test_chat_wraps_the_prompt(tiny_llama: Path) -> None:
    arguments = ("generate", str(tiny_llama), "--prompt", "hi", "--max-new", "2", "--json")
    assert json.loads(lmpress(*arguments, "--chat").out)["prompt_tokens"] == len("user: hi") + 2
    assert json.loads(lmpress(*arguments).out)["prompt_tokens"] == 2


def test_chat_without_a_template(tiny_llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    done = lmpress("generate", str(folder), "--prompt", "hi", "--chat")
    assert (done.code, done.out) == (2, "")
    assert "has no chat template: leave --chat out" in done.err


def test_refused(tiny_llama: Path) -> None:
    empty = lmpress("generate", str(tiny_llama), "--prompt", "")
    assert (empty.code, empty.err) == (2, "lmpress: prompt: has no tokens: give some text\n")
    hot = lmpress("generate", str(tiny_llama), "--prompt", "x", "--temperature", "-1")
    assert (hot.code, hot.err) == (2, "lmpress: sampling: temperature is -1.0: give 0 (greedy) or more\n")


def test_a_generation_config_that_is_broken_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "broken")
    (folder / "generation_config.json").write_text('{"eos_token_id": 1, "eos_token_id": 2}')
    done = lmpress("generate", str(folder), "--prompt", "hi", "--max-new", "1")
    assert done.code == 1 and "generation_config.json: key 'eos_token_id' is given twice" in done.err


def test_beyond_the_context(tiny_llama: Path) -> None:
    done = lmpress("generate", str(tiny_llama), "--prompt", "x" * 510, "--max-new", "3")
    assert done.code == 0 and "513 tokens may be reached, and the model was made for 512" in done.err


def test_pieces_are_whole_letters() -> None:
    """Letters of several bytes come when their last byte has; bytes that never complete one come at the end."""
    tokenizer = byte_tokenizer()
    prompt, text = tokenizer("größe: ").input_ids, "Ünïcode 🦆 and more, well beyond the overlap"
    got = list(pieces(tokenizer, prompt, tokenizer(text).input_ids))
    assert "".join(got) == text and got[0] == "Ü" and "🦆" in got
    assert list(pieces(tokenizer, prompt, tokenizer("aé").input_ids[:2])) == ["a", "\ufffd"]
    assert list(pieces(tokenizer, prompt, [])) == []
