"""Text: documents out of local files or a dataset, encoded and packed into equal sequences of tokens."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.errors import InputError, did_you_mean

SUFFIXES = (".txt", ".jsonl", ".parquet")

Row = tuple[str, Any]  # where it stands, for messages, and what it holds

# A seeded choice is made among this many times the tokens asked for; what comes later in the text is not even encoded.
READ_AHEAD = 16
# Characters that are encoded at once: a longer document is encoded in pieces, and only as many as it takes.
PIECE = 1 << 20


@dataclass(frozen=True)
class Packed:
    """ids: int64 [samples, seqlen]. notes: what differs from what was asked for, in words."""

    ids: Tensor
    notes: tuple[str, ...] = ()


def read_documents(source: Path | str, tokenizer: Any | None = None) -> Iterator[str]:
    """The documents in `source`: a file, a folder of files (in order of their names), or the name of a dataset.

    They are read one by one, as they are asked for; blank ones are left out.

    A .txt file is one document, whole. A line of .jsonl, a row of .parquet or of a dataset is one: its `text`, or its
    `messages`. A dataset is NAME, NAME:SPLIT or NAME:CONFIG:SPLIT, its split `train` if not named; it is looked up only
    where no such path exists, and on a network only where HF_HUB_OFFLINE allows. Where `tokenizer` is given, each
    document goes through its chat template, plain text as one message of a user. Raises InputError for a source that
    is missing, and, once it is read so far, for one that is empty, binary, or lacks these fields.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise InputError(f"{path}: holds no {', '.join(SUFFIXES)} file: name a folder that does, or a file")
        rows: Iterator[Row] = (row for file in files for row in _read_file(file))
    elif path.exists():
        rows = _read_file(path)
    elif path.suffix in SUFFIXES or str(source).startswith(("/", ".", "~")):
        raise InputError(f"{path}: no such file or folder: name a file or folder of text")
    else:
        rows = _read_dataset(str(source))
    return _documents(rows, source, tokenizer)


def _documents(rows: Iterator[Row], source: Path | str, tokenizer: Any | None) -> Iterator[str]:
    """The text of each of `rows` that has any. Raises InputError where none has."""
    found = False
    for where, row in rows:
        document = _document(row, where, tokenizer)
        if document and not document.isspace():
            found = True
            yield document
    if not found:
        raise InputError(f"{source}: holds no text: name a file or folder of text")


def encode_and_pack(
    documents: Iterable[str], tokenizer: Any, samples: int, seqlen: int, seed: int | None, name: Path | str = "text"
) -> Packed:
    """Up to `samples` sequences of `seqlen` tokens: documents strung together with the end-of-text token between them.

    The string is cut into consecutive windows, of which `seed` chooses; None takes the first ones. Windows stay in
    order. Where the tokenizer puts a start token in front of every text, each window begins with it. Fewer windows than
    asked for is a note, and so is text that was not looked at; not one is an InputError, which calls the text `name`.
    """
    prefix = start_tokens(tokenizer)
    stride = seqlen - len(prefix)
    enough = samples * stride * (1 if seed is None else READ_AHEAD)
    stream, unread = _encode(documents, tokenizer, enough)
    windows = len(stream) // stride
    if not windows:
        raise InputError(
            f"{name}: {len(stream)} tokens are less than one sequence: give more text, or set seqlen to "
            f"{len(stream) + len(prefix)} or less"
        )
    notes = []
    if windows < samples:
        notes.append(f"{name}: {len(stream)} tokens make {windows} sequences of {seqlen}, not the {samples} asked for")
    if unread:
        notes.append(f"{name}: {unread}, which is enough")
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


def _encode(documents: Iterable[str], tokenizer: Any, enough: int) -> tuple[Tensor, str]:
    """Ids [n] of as much text as it takes to have `enough`, and where that ended; empty if nothing was left over."""
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = array("q")
    for number, document in enumerate(documents, start=1):
        if len(ids) >= enough:
            return torch.tensor(ids, dtype=torch.int64), f"reading ended behind document {number - 1}"
        ids.extend(separator if ids else [])
        used = 0
        for piece in pieces(document):
            if used and len(ids) >= enough:
                place = f"character {used:,} of {len(document):,} in document {number}"
                return torch.tensor(ids, dtype=torch.int64), f"reading ended behind {place}"
            ids.extend(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
            used += len(piece)
    return torch.tensor(ids, dtype=torch.int64), ""


def pieces(document: str) -> Iterator[str]:
    """`document` in pieces of at most PIECE characters, cut in front of a space where there is one."""
    start = 0
    while len(document) - start > PIECE:
        space = max(document.rfind(mark, start + 1, start + PIECE) for mark in " \n\t")
        stop = space if space > start else start + PIECE
        yield document[start:stop]
        start = stop
    yield document[start:]


def _read_file(file: Path) -> Iterator[Row]:
    if file.suffix == ".parquet":
        return _parquet_rows(file)
    if file.suffix == ".jsonl":
        return _json_rows(file)
    if file.suffix == ".txt":
        return _whole_text(file)
    raise InputError(f"{file}: is none of {', '.join(SUFFIXES)}: rename or convert it")


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
        raise InputError(f"{where}: holds messages, which need the chat template: set chat to true")
    return _chat(messages, where, tokenizer)


def _chat(messages: Any, where: str, tokenizer: Any) -> str:
    from jinja2 import TemplateError

    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError(f"{where}: the model's tokenizer has no chat template: set chat to false")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{where}: field 'messages' does not fit the chat template: {_line(error)}") from None


def _decode(data: bytes, file: Path, start: int = 0) -> str:
    """The UTF-8 text of `data`, which begins at byte `start` of `file`, without a byte order mark there."""
    if b"\0" in data:
        raise InputError(f"{file}: byte {start + data.index(0)} is NUL: this is no text: give one in UTF-8")
    try:
        return data.decode("utf-8" if start else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: byte {start + error.start} is not UTF-8: convert the text to UTF-8") from None


def _lines(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as stream:
            yield from stream
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}: name a file or folder of text") from None


def _whole_text(file: Path) -> Iterator[Row]:
    yield str(file), {"text": _decode(b"".join(_lines(file)), file)}


def _json_rows(file: Path) -> Iterator[Row]:
    start = 0
    for number, data in enumerate(_lines(file), start=1):
        line = _decode(data, file, start)
        start += len(data)
        if line.strip():
            try:
                yield f"{file}: line {number}", json.loads(line)
            except ValueError as error:
                raise InputError(
                    f"{file}: line {number} is not JSON: {_line(error)}: write one object per line"
                ) from None


def _parquet_rows(file: Path) -> Iterator[Row]:
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


def _read_dataset(source: str) -> Iterator[Row]:
    """Rows of a dataset. On a network they are fetched as they are asked for, but for a split that is a slice."""
    from datasets import config, load_dataset
    from datasets.exceptions import DatasetsError

    name, *rest = re.split(r":(?![^\[]*\])", source)  # but not at the colon of a split like train[:1000]
    split = rest.pop() if rest else "train"
    streaming = "[" not in split and not config.HF_HUB_OFFLINE
    try:
        for number, row in enumerate(load_dataset(name, *rest, split=split, streaming=streaming), start=1):
            yield f"{source}: row {number}", row
    except (DatasetsError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(
            f"{source}: neither a path nor a dataset that loads: {_line(error)}: name a local text"
        ) from None


def _line(error: Exception) -> str:
    """What `error` says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__
