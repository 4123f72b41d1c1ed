"""Kernels inside a checkpoint: `kernels/` holds one binary per kernel and target, and a manifest that describes them.

A binary is code from wherever the folder came from. Nothing here runs one: `read_binary` gives bytes only where they
are those that the manifest notes, and `compress.kernels.trust` decides whether these bytes may run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from compress.errors import InputError

FOLDER = "kernels"
MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
HOST = "host"

MANIFEST_BYTES = 1 << 20
BINARY_BYTES = 64 << 20
# CUDA's limits on one block; the shared memory is that of sm_90 and sm_100, 227 KiB.
THREADS = 1024
SHARED_BYTES = 227 << 10
POINTERS = ("*fp32", "*fp16", "*bf16", "*i8", "*u8", "*i32", "*i64")
SCALARS = ("i32", "i64", "fp32")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}")
SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Entry:
    """One binary and all that a launcher must know of it.

    name: of the kernel's variant, or of the CPU library's instruction set. target: sm_90, gfx942, ... or `host`, and
    then platform is the system and processor it is for, such as linux-x86_64. format: of the weights it multiplies, or
    kv-cache; None for a library, which serves several. symbol: its entry, None for a library. threads and shared_bytes:
    of one block. arguments: (name, type) in order. constants: what was fixed at compilation.
    """

    file: str
    name: str
    target: str
    platform: str | None
    format: str | None
    symbol: str | None
    threads: int
    shared_bytes: int
    arguments: tuple[tuple[str, str], ...]
    constants: dict[str, int]
    nbytes: int
    sha256: str
    source_sha256: str
    builder: dict[str, str]


@dataclass(frozen=True)
class Built:
    """An entry and its binary."""

    entry: Entry
    binary: bytes


class Finding(NamedTuple):
    """What is wrong with one file of a kernels folder. message: one line that names it and the mend."""

    file: str
    problem: Literal["missing", "extra", "changed", "stale"]
    message: str


def exported_files(built: Iterable[Built], kept: Iterable[Entry] = ()) -> dict[str, str | bytes]:
    """File name in the checkpoint -> content, of the binaries in `built` and a manifest of them and of `kept`.

    Sorted and without dates, so that the same binaries give the same bytes. Raises ValueError for a name that is taken.
    """
    built = sorted(built, key=lambda one: one.entry.file)
    entries = sorted([*(one.entry for one in built), *kept], key=lambda entry: entry.file)
    names = [entry.file for entry in entries]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} is the file of two kernels")
    document = {"schema_version": SCHEMA_VERSION, "kernels": [asdict(entry) for entry in entries]}
    files: dict[str, str | bytes] = {f"{FOLDER}/{one.entry.file}": one.binary for one in built}
    return files | {f"{FOLDER}/{MANIFEST}": json.dumps(document, indent=1) + "\n"}


def write(folder: Path, built: Iterable[Built], targets: Collection[str]) -> tuple[Entry, ...]:
    """Put `built` in the place of whatever the checkpoint in `folder` holds for `targets`; its other kernels stay.

    The manifest is replaced last, in one step. Returns all entries. Raises InputError for a manifest that is there and
    cannot be read, or a disk that fails.
    """
    earlier = read_manifest(folder) if has_kernels(folder) else ()
    kept = [entry for entry in earlier if entry.target not in targets]
    files = exported_files(built, kept)
    place = folder / FOLDER
    try:
        place.mkdir(exist_ok=True)
        for name, content in files.items():
            replace_file(folder / name, content.encode() if isinstance(content, str) else content)
        for entry in earlier:
            if entry not in kept and f"{FOLDER}/{entry.file}" not in files:
                (place / entry.file).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"{error.filename}: cannot be written ({error.strerror}): free some space, or check its permissions"
        ) from error
    return read_manifest(folder)


def replace_file(file: Path, content: bytes) -> None:
    """Write `content` to `file` in one step: a reader sees the old file or the new one. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".writing-", delete=False) as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
        os.fchmod(stream.fileno(), 0o644)
    os.replace(stream.name, file)


def has_kernels(folder: Path) -> bool:
    """Whether the checkpoint in `folder` came with a kernels folder."""
    return (folder / FOLDER).is_dir()


def read_manifest(folder: Path) -> tuple[Entry, ...]:
    """The entries of the checkpoint in `folder`, every field checked; no binary is read.

    Raises InputError for a manifest that is missing, of another schema, or has a field amiss.
    """
    file = folder / FOLDER / MANIFEST
    if not has_kernels(folder):
        raise InputError(f"{folder}: holds no kernels: build some with `lmpress kernels build {folder}`")
    document = _document(_read(file, MANIFEST_BYTES), file)
    version = document.pop("schema_version", None)
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise InputError(
            f"{file}: field 'schema_version' is {version!r}, this lmpress reads {SCHEMA_VERSION}: use the version that "
            "wrote it, or build the kernels again"
        )
    rows = document.pop("kernels", None)
    if not isinstance(rows, list) or document:
        wrong = next(iter(document), "kernels")
        raise InputError(f"{file}: field {wrong!r} is not as this lmpress writes it: build the kernels again")
    entries = tuple(parse_entry(row, f"{file}: field 'kernels.{index}") for index, row in enumerate(rows))
    for key, what in ((lambda e: e.file, "file"), (lambda e: (e.name, e.target, e.platform), "kernel and target")):
        found = [key(entry) for entry in entries]
        twice = next((value for value in found if found.count(value) > 1), None)
        if twice is not None:
            raise InputError(f"{file}: names the {what} {twice!r} twice: build the kernels again")
    return entries


def read_binary(folder: Path, entry: Entry) -> bytes:
    """The binary of `entry` in the checkpoint in `folder`.

    Raises InputError, naming the file, where it is missing or its bytes are not those that the manifest notes.
    """
    file = folder / FOLDER / entry.file
    binary = _read(file, BINARY_BYTES)
    found = hashlib.sha256(binary).hexdigest()
    if len(binary) != entry.nbytes or found != entry.sha256:
        raise InputError(
            f"{file}: has {len(binary)} bytes with sha256 {found[:16]}..., and {MANIFEST} notes {entry.nbytes} with "
            f"{entry.sha256[:16]}...: it was changed after it was built and is not run: build it again with "
            f"`lmpress kernels build {folder}`"
        )
    return binary


def verify(folder: Path, source_of: Callable[[Entry], str | None]) -> list[Finding]:
    """All that is wrong with the kernels of the checkpoint in `folder`; an empty list if they are as they were built.

    source_of: the sha256 of the installed package's source of a kernel, None for one that it does not have. Raises
    InputError for a manifest that cannot be read.
    """
    findings = []
    entries = {entry.file: entry for entry in read_manifest(folder)}
    mend = f"build it again with `lmpress kernels build {folder}`"
    for name, entry in entries.items():
        file = folder / FOLDER / name
        if not os.path.lexists(file):
            findings.append(Finding(name, "missing", f"{file}: is missing, and {MANIFEST} names it: {mend}"))
            continue
        try:
            read_binary(folder, entry)
        except InputError as error:
            findings.append(Finding(name, "changed", str(error)))
        source = source_of(entry)
        if source != entry.source_sha256:
            known = "this lmpress has no such kernel" if source is None else "this lmpress has another source for it"
            findings.append(Finding(name, "stale", f"{file}: {known}: {mend}"))
    for found in sorted(os.listdir(folder / FOLDER)):
        if found not in entries and found != MANIFEST:
            message = f"{folder / FOLDER / found}: is not in {MANIFEST}: remove it"
            findings.append(Finding(found, "extra", message))
    return findings


def _document(text: bytes, file: Path) -> dict[str, Any]:
    """The JSON object in `text`. Duplicate keys are refused: readers would keep the last one and say nothing."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key is given twice")
        return dict(pairs)

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: is not valid JSON ({error}): build the kernels again") from error
    if not isinstance(value, dict):
        raise InputError(f"{file}: is a JSON {type(value).__name__}, not an object: build the kernels again")
    return value


def parse_entry(row: Any, place: str) -> Entry:
    """The Entry behind one row of the manifest; `place` begins every message."""
    names = [field.name for field in fields(Entry)]
    if not isinstance(row, dict):
        raise InputError(f"{place}' is not an object: build the kernels again")
    for name in dict.fromkeys([*names, *row]):
        if (name in row) != (name in names):
            state = "unknown" if name in row else "missing"
            raise InputError(f"{place}.{name}' is {state}: build the kernels again")
    for name, right in _RULES.items():
        if not right(row[name]):
            raise InputError(f"{place}.{name}' is {str(row[name])[:60]!r}, which cannot be: build the kernels again")
    arguments = tuple((name, kind) for name, kind in row["arguments"])
    return Entry(**{**row, "arguments": arguments})


def _name(value: Any) -> bool:
    return isinstance(value, str) and NAME.fullmatch(value) is not None and ".." not in value


def _count(most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and 0 <= value <= most


def _table(value: Any, kind: type) -> bool:
    return isinstance(value, dict) and all(_name(key) and type(one) is kind for key, one in value.items())


def _arguments(value: Any) -> bool:
    kinds = (*POINTERS, *SCALARS)
    return isinstance(value, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and _name(pair[0]) and pair[1] in kinds for pair in value
    )


def _digest(value: Any) -> bool:
    return isinstance(value, str) and DIGEST.fullmatch(value) is not None


_RULES: dict[str, Callable[[Any], bool]] = {
    "file": lambda value: _name(value) and value != MANIFEST,
    "name": _name,
    "target": _name,
    "platform": lambda value: value is None or _name(value),
    "format": lambda value: value is None or _name(value),
    "symbol": lambda value: value is None or (isinstance(value, str) and SYMBOL.fullmatch(value) is not None),
    "threads": _count(THREADS),
    "shared_bytes": _count(SHARED_BYTES),
    "arguments": _arguments,
    "constants": lambda value: _table(value, int),
    "nbytes": _count(BINARY_BYTES),
    "sha256": _digest,
    "source_sha256": _digest,
    "builder": lambda value: _table(value, str),
}


def _read(file: Path, most: int) -> bytes:
    """The bytes of a regular file of at most `most` bytes; no link is followed and no pipe waited for."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as stream:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size > most:
                raise InputError(f"{file}: is no regular file of at most {most} bytes: build the kernels again")
            return stream.read(most)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}): build the kernels again") from error
