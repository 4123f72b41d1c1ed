"""Text: documents out of local files or a dataset, encoded and packed into equal sequences of tokens."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.errors import InputError, did_you_mean

SUFFIXES = (".txt", ".jsonl", ".parquet")

# A seeded choice is made among this many times the tokens asked for; what comes later in the text is not even encoded.
READ_AHEAD = 16


@dataclass(frozen=True)
class Packed:
    """ids: int64 [samples, seqlen]. notes: what differs from what was asked for, in words."""

    ids: Tensor
    notes: tuple[str, ...] = ()


def read_documents(source: Path | str, tokenizer: Any | None = None) -> list[str]:
    """The documents in `source`: a file, a folder of files (in order of their names), or the name of a dataset.

    A .txt file is one document, whole. A line of .jsonl, a row of .parquet or of a dataset is one: its `text`, or its
    `messages`. A dataset is NAME, NAME:SPLIT or NAME:CONFIG:SPLIT, its split `train` if not named; it is looked up only
    where no such path exists, and on a network only where HF_HUB_OFFLINE allows. Where `tokenizer` is given, each
    document goes through its chat template, plain text as one message of a user. Raises InputError for a source that
    is missing, empty, binary, or lacks these fields.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise InputError(f"{path}: holds no {', '.join(SUFFIXES)} file: name a folder that does, or a file")
        documents = [document for file in files for document in _read_file(file, tokenizer)]
    elif path.exists():
        documents = list(_read_file(path, tokenizer))
    elif path.suffix in SUFFIXES or str(source).startswith(("/", ".", "~")):
        raise InputError(f"{path}: no such file or folder: name a file or folder of text")
    else:
        documents = list(_read_dataset(str(source), tokenizer))
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise InputError(f"{source}: holds no text: name a file or folder of text")
    return documents


def encode_and_pack(
    documents: Sequence[str], tokenizer: Any, samples: int, seqlen: int, seed: int | None, name: Path | str = "text"
) -> Packed:
    """Up to `samples` sequences of `seqlen` tokens: documents strung together with the end-of-text token between them.

    The string is cut into consecutive windows, of which `seed` chooses; None takes the first ones. Windows stay in
    order. Where the tokenizer puts a start token in front of every text, each window begins with it. Fewer windows than
    asked for is a note; not one is an InputError, which calls the text `name`.
    """
    prefix = start_tokens(tokenizer)
    stride = seqlen - len(prefix)
    enough = samples * stride * (1 if seed is None else READ_AHEAD)
    stream, used = _encode(documents, tokenizer, enough)
    windows = len(stream) // stride
    if not windows:
        raise InputError(
            f"{name}: {len(stream)} tokens are less than one sequence: give more text, or set calibration.seqlen to "
            f"{len(stream) + len(prefix)} or less"
        )
    notes = []
    if windows < samples:
        notes.append(f"{name}: {len(stream)} tokens make {windows} sequences of {seqlen}, not the {samples} asked for")
    if used < len(documents):
        notes.append(f"{name}: the first {used} of {len(documents)} documents were read, which is enough")
    chosen = torch.arange(min(samples, windows))
    if seed is not None:
        order = torch.randperm(windows, generator=torch.Generator().manual_seed(seed))
        chosen = order[: len(chosen)].sort().values
    ids = stream[: windows * stride].view(windows, stride)[chosen]
    start = torch.tensor(prefix, dtype=torch.int64).expand(len(ids), -1)
    return Packed(torch.cat([start, ids], dim=1), tuple(notes))


def fingerprint(ids: Tensor) -> str:
    """The sha256 of token ids, as little-endian 64-bit integers in order."""
    return hashlib.sha256(ids.to("cpu", torch.int64).contiguous().numpy().astype("<i8").tobytes()).hexdigest()


def start_tokens(tokenizer: Any) -> list[int]:
    """The start token, if the tokenizer puts one in front of every text by itself; else an empty list."""
    start = tokenizer.bos_token_id
    return [start] if start is not None and tokenizer("a", verbose=False)["input_ids"][:1] == [start] else []


def _encode(documents: Sequence[str], tokenizer: Any, enough: int) -> tuple[Tensor, int]:
    """Ids [n] of as many documents as it takes to have `enough`, and how many those were."""
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = array("q")
    used = 0
    for used, document in enumerate(documents, start=1):  # noqa: B007
        ids.extend(
            (separator if ids else []) + tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        )
        if len(ids) >= enough:
            break
    return torch.tensor(ids, dtype=torch.int64), used


def _read_file(file: Path, tokenizer: Any | None) -> Iterator[str]:
    if file.suffix == ".parquet":
        rows = _parquet_rows(file)
    elif file.suffix == ".jsonl":
        rows = _json_rows(file)
    elif file.suffix == ".txt":
        rows = iter([(str(file), {"text": _decode(file)})])
    else:
        raise InputError(f"{file}: is none of {', '.join(SUFFIXES)}: rename or convert it")
    return (_document(row, where, tokenizer) for where, row in rows)


def _document(row: Any, where: str, tokenizer: Any | None) -> str:
    """The text of one `row`, a dictionary with `text` or `messages`."""
    if not isinstance(row, dict):
        raise InputError(f"{where}: is not an object with a field 'text' or 'messages': write one per line")
    text, messages = row.get("text"), row.get("messages")
    if isinstance(text, str) and tokenizer is None:
        return text
    if isinstance(text, str) and messages is None:
        messages = [{"role": "user", "content": text}]
    if messages is None:
        found = ", ".join(map(repr, row)) or "none"
        nearest = next((hint for key in row if (hint := did_you_mean(str(key), ("text", "messages")))), "")
        raise InputError(f"{where}: has no field 'text' or 'messages' (fields: {found}){nearest}")
    if tokenizer is None:
        raise InputError(f"{where}: holds messages, which need the chat template: set calibration.chat to true")
    return _chat(messages, where, tokenizer)


def _chat(messages: Any, where: str, tokenizer: Any) -> str:
    from jinja2 import TemplateError

    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError(f"{where}: the model's tokenizer has no chat template: set calibration.chat to false")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{where}: field 'messages' does not fit the chat template: {_line(error)}") from None


def _decode(file: Path) -> str:
    """The UTF-8 text in `file`, without a byte order mark."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}: name a file or folder of text") from None
    if b"\0" in data:
        raise InputError(f"{file}: byte {data.index(0)} is NUL: this is no text: give one in UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: byte {error.start} is not UTF-8: convert the text to UTF-8") from None


def _json_rows(file: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(_decode(file).split("\n"), start=1):
        if line.strip():
            try:
                yield f"{file}: line {number}", json.loads(line)
            except ValueError as error:
                raise InputError(
                    f"{file}: line {number} is not JSON: {_line(error)}: write one object per line"
                ) from None


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(file) as table:
            wanted = [name for name in table.schema_arrow.names if name in ("text", "messages")]
            if not wanted:
                raise InputError(
                    f"{file}: has no column 'text' or 'messages' (columns: {', '.join(table.schema_arrow.names)})"
                )
            for batch in table.iter_batches(columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}: row {number}", row
    except (ArrowException, OSError) as error:
        raise InputError(f"{file}: is not a readable Parquet file: {_line(error)}: write it again") from None


def _read_dataset(source: str, tokenizer: Any | None) -> Iterator[str]:
    from datasets import load_dataset

    name, *rest = re.split(r":(?![^\[]*\])", source)  # but not at the colon of a split like train[:1000]
    split = rest.pop() if rest else "train"
    try:
        rows = load_dataset(name, *rest, split=split)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(
            f"{source}: neither a path nor a dataset that loads: {_line(error)}: name a local text"
        ) from None
    return (_document(row, f"{source}: row {number}", tokenizer) for number, row in enumerate(rows, start=1))


def _line(error: Exception) -> str:
    """What `error` says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__
