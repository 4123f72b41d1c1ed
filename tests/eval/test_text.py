"""Windows: what is predicted, how many bytes stand behind it, and texts that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compress import texts
from compress.errors import InputError
from compress.eval.text import cut_windows
from tests.eval.fakes import ByteTokenizer


def write(folder: Path, text: str, name: str = "text.txt") -> Path:
    file = folder / name
    file.write_bytes(text.encode())
    return file


def test_windows_do_not_overlap_and_leave_the_tail_out(tmp_path: Path) -> None:
    windows = cut_windows([write(tmp_path, "abcdefghijk")], ByteTokenizer(), context=4)
    assert windows.tokens.tolist() == [list(b"abcd"), list(b"efgh")]
    assert (windows.predicted, windows.nbytes, windows.characters) == (6, 6, 6)


def test_a_start_token_that_the_tokenizer_adds_leads_every_window(tmp_path: Path) -> None:
    windows = cut_windows([write(tmp_path, "abcdefgh")], ByteTokenizer(start=256), context=4)
    assert windows.tokens.tolist() == [[256, *b"abc"], [256, *b"def"]]
    assert (windows.predicted, windows.nbytes) == (6, 6)


def test_bytes_are_counted_in_utf8(tmp_path: Path) -> None:
    # Six tokens of two bytes each as characters: "é" is two byte tokens.
    windows = cut_windows([write(tmp_path, "aéaéaé")], ByteTokenizer(), context=3)
    assert windows.tokens.shape == (3, 3)
    assert (windows.nbytes, windows.characters) == (6, 3)


def test_a_tokenizer_without_positions_is_right_on_average(tmp_path: Path) -> None:
    file = write(tmp_path, "abcdefgh" * 50)
    assert cut_windows([file], ByteTokenizer(fast=False), 20).nbytes == cut_windows([file], ByteTokenizer(), 20).nbytes


def test_the_limit_is_shared_by_files_and_no_window_spans_two(tmp_path: Path) -> None:
    files = [write(tmp_path, letter * 100, f"{letter}.txt") for letter in "ab"]
    windows = cut_windows(files, ByteTokenizer(), context=10, limit=40)
    assert windows.tokens.tolist() == [[97] * 10] * 2 + [[98] * 10] * 2
    assert windows.name == "a.txt, b.txt"
    assert cut_windows(files, ByteTokenizer(), context=10, limit=1).tokens.shape == (2, 10)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no text"),
        (b" \n", "no text"),
        (b"a\0b", "NUL"),
        (b"\xff\xfe", "byte 0 is not UTF-8"),
        (b"abc", "3 tokens"),
    ],
    ids=["empty", "blank", "nul", "binary", "short"],
)
def test_a_text_that_cannot_be_used_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "bad.txt"
    file.write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        cut_windows([file], ByteTokenizer(), context=4)
    assert str(file) in str(caught.value)


def test_a_long_text_is_encoded_in_pieces_and_no_further_than_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "größer als ein Stück " * 40)
    whole = cut_windows([file], ByteTokenizer(), context=16)
    monkeypatch.setattr(texts, "PIECE", 50)
    pieced = cut_windows([file], ByteTokenizer(), context=16)
    assert torch.equal(pieced.tokens, whole.tokens)
    assert (pieced.nbytes, pieced.characters) == (whole.nbytes, whole.characters)
    lengths: list[int] = []

    class Counting(ByteTokenizer):
        def __call__(self, text: str, *arguments: Any, **options: Any) -> dict[str, Any]:
            lengths.append(len(text))
            return super().__call__(text, *arguments, **options)

    assert torch.equal(cut_windows([file], Counting(), 16, limit=64).tokens, whole.tokens[:4])
    assert sum(lengths) <= 100 + len("a")  # two pieces, and the look for a start token


def test_documents_of_a_jsonl_file_are_one_text(tmp_path: Path) -> None:
    file = write(tmp_path, '{"text": "ab"}\n{"text": "cd"}\n', "text.jsonl")
    assert cut_windows([file], ByteTokenizer(), context=6).tokens.tolist() == [list(b"ab\n\ncd")]


def test_a_missing_text_and_a_context_of_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        cut_windows([tmp_path / "none.txt"], ByteTokenizer(), context=4)
    with pytest.raises(InputError, match="--context: 1"):
        cut_windows([write(tmp_path, "abc")], ByteTokenizer(), context=1)
