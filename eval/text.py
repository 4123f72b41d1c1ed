"""Evaluation text: files cut into non-overlapping windows of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.errors import USAGE, InputError
from compress.texts import pieces, read_documents, start_tokens


@dataclass(frozen=True)
class Windows:
    """tokens: int64 [W, T], of which each row's first is given and the other T - 1 are predicted.

    nbytes, characters: of the text behind the predicted tokens (UTF-8). name: of the files, for the report.
    """

    name: str
    tokens: Tensor
    nbytes: int
    characters: int

    @property
    def predicted(self) -> int:
        return self.tokens.shape[0] * (self.tokens.shape[1] - 1)


def cut_windows(files: Sequence[Path], tokenizer: Any, context: int, limit: int | None = None) -> Windows:
    """Windows of `context` tokens over `files`, each file cut by itself and its last, shorter piece left out.

    Where the tokenizer puts a start token in front of text by itself, each window starts with it, followed by
    context - 1 tokens of text. `limit` bounds the tokens over all files, shared evenly; each gives at least one window.
    Raises InputError for a context under 2 and a file that is unreadable or shorter than one window.
    """
    if context < 2:
        raise InputError(f"--context: {context} predicts nothing: give 2 or more", USAGE)
    prefix = start_tokens(tokenizer)
    stride = context - len(prefix)
    most = None if limit is None else max(1, limit // context // len(files))
    rows: list[list[int]] = []
    nbytes = characters = 0
    for file in files:
        text = read_text(file)
        tokens, ends = encode(tokenizer, text, most and most * stride)
        count = len(tokens) // stride
        if not count:
            found = f"{len(tokens)} tokens do not fill one window of {context}"
            raise InputError(f"{file}: {found}: lower the context or give more text")
        for start in range(0, min(count, most or count) * stride, stride):
            rows.append(prefix + tokens[start : start + stride])
            given = start if prefix else start + 1
            covered = text[ends[given - 1] if given else 0 : ends[start + stride - 1]]
            nbytes += len(covered.encode())
            characters += len(covered)
    return Windows(", ".join(file.name for file in files), torch.tensor(rows), nbytes, characters)


def encode(tokenizer: Any, text: str, enough: int | None = None) -> tuple[list[int], list[int]]:
    """Token ids of `text` without special tokens, and the character position where each token ends.

    Of a long text, no more is encoded than gives `enough` tokens.
    """
    ids: list[int] = []
    ends: list[int] = []
    start = 0
    for piece in pieces(text):
        if enough is not None and len(ids) >= enough:
            break
        found, stops = _encode_piece(tokenizer, piece)
        ids += found
        ends += [start + stop for stop in stops]
        start += len(piece)
    return ids, ends


def _encode_piece(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """A tokenizer that cannot tell positions gets evenly spread ones, right on average over a text."""
    if not tokenizer.is_fast:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids, [(index + 1) * len(text) // len(ids) for index in range(len(ids))]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return encoded["input_ids"], [end for _, end in encoded["offset_mapping"]]


def read_text(file: Path) -> str:
    """The documents in `file` (.txt, .jsonl or .parquet) as one text. Raises InputError where there is none."""
    if not file.is_file():
        raise InputError(f"{file}: no such file: name a held-out text")
    return "\n\n".join(read_documents(file))
