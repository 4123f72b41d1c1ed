"""What llama.cpp makes of our GGUF files: the same tokens and the same losses.

Runs where LMPRESS_LLAMA_PYTHON names an interpreter that can import llama_cpp (`pip install llama-cpp-python` in a venv
of its own builds it in some minutes); it is no dependency, and CI goes without.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from compress.eval.perplexity import perplexity
from compress.eval.quality import window_nll
from compress.eval.text import Windows
from compress.formats.scheme import scheme_named
from compress.runtime.load import Execution, load_model
from examples.llama_check import asked
from tests.checkpoint.interop.test_gguf import exported
from tests.checkpoint.interop.vocabularies import MAKERS, TEXT, write_tokenizer
from tests.runtime.families import CASES, Case, write_case
from tests.runtime.packing import write_packed
from tests.tiny import write_model

PYTHON = os.environ.get("LMPRESS_LLAMA_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="LMPRESS_LLAMA_PYTHON names no interpreter with llama_cpp")

FAMILIES = {
    name: CASES[name]
    for name in (
        "llama",
        "llama, llama3 rope, biases, tied",
        "llama, linear rope",
        "mistral without window",
        "qwen2",
        "qwen3",
    )
}
# A head of 32 or more: llama.cpp pads its attention to that.
WIDE = {"head_dim": 32, "hidden_size": 128}


def windows(rows: int, length: int) -> Windows:
    """Random bytes; of these models, any sequence is text."""
    tokens = torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(0))
    return Windows("random", tokens, 0, 0)


def losses(folder: Path, file: Path, work: Path) -> tuple[float, float, torch.Tensor]:
    """Perplexity here and there, and the differences of the losses token by token."""
    given = windows(2, 96)
    model = load_model(folder, execution=Execution(kernels="reference"))
    ours = torch.stack([window_nll(model, tokens) for tokens in given.tokens])
    theirs = torch.tensor(asked(PYTHON, file, given, "a", work)["nll"], dtype=torch.float64)
    return perplexity(ours)[0], perplexity(theirs)[0], (ours - theirs).abs()


@pytest.mark.parametrize("name", FAMILIES)
def test_families_lose_the_same(name: str, tmp_path: Path) -> None:
    model_type, changes = FAMILIES[name]
    folder = write_case(tmp_path / "model", Case(model_type, changes | WIDE))
    _, _, apart = losses(folder, exported(folder, tmp_path / "out.gguf", "F32").output, tmp_path)
    # Keys and values are float16 in llama.cpp's cache.
    assert apart.max() < 0.02


@pytest.mark.parametrize("scheme", [scheme_named("W4A16", 32), scheme_named("W8A8")], ids=lambda one: one.name)
def test_carried_integers_lose_the_same(scheme: object, tiny_llama: Path, tmp_path: Path) -> None:
    folder = write_packed(tiny_llama, tmp_path / "packed", scheme)  # type: ignore[arg-type]
    ours, theirs, _ = losses(folder, exported(folder, tmp_path / "out.gguf").output, tmp_path)
    assert theirs == pytest.approx(ours, rel=0.01)


@pytest.mark.parametrize("name", MAKERS)
def test_text_becomes_the_same_tokens(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", vocab_size=600)
    tokenizer: Tokenizer = MAKERS[name]()
    write_tokenizer(tokenizer, folder)
    file = exported(folder, tmp_path / "out.gguf", "F32").output
    text = TEXT * 2 + "the king's ring rings in the spring"
    answer = asked(PYTHON, file, windows(1, 8), text, tmp_path)
    assert answer["ids"] == tokenizer.encode(text, add_special_tokens=False).ids
