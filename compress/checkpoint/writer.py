"""A checkpoint written section by section, durably, that a kill at any moment leaves resumable to the same bytes.

Work happens in `<output>.partial/`. A section's tensors are appended to a shard, synced, read back from the disk and
compared, and only then noted in the journal; the folder takes its final name when all of it is there. What a kill
interrupts is not in the journal and is written again, at the same place, by the next run with the same plan.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.disk import (
    check_space,
    drop_cache,
    explained,
    opened,
    read_chunks,
    sync_folder,
    tensor_bytes,
    write_at,
    write_file,
)
from compress.checkpoint.header import DTYPE_NAMES, TensorInfo, encode_header, read_header
from compress.checkpoint.journal import Entry, Journal
from compress.checkpoint.layout import SHAPE_BYTES, Section, Shard, digest, lay_out
from compress.checkpoint.output import (
    FINGERPRINT,
    JOURNAL,
    REPLACED,
    WORK,
    clear,
    is_finished,
    partial_folder,
    publish,
    tidy,
)
from compress.checkpoint.reader import INDEX, read_tensor
from compress.errors import InputError

log = logging.getLogger(__name__)

JOURNAL_VERSION = 1


class Writer:
    """Writes the planned `sections`, in their order, to shards of at most `shard_bytes` of data, then publishes them.

    fingerprint: of everything that decides the result; work that lies there with another one is refused, or with
    `restart` discarded. room: bytes that the disk must have to spare, the plan's upper bounds unless given. complete:
    the output already holds this very result, and there is nothing to write.
    Raises InputError for an output folder that is not ours to write, or a disk without room for the plan.
    """

    def __init__(
        self,
        output: Path,
        sections: Sequence[Section],
        fingerprint: str,
        shard_bytes: int = 4 << 30,
        restart: bool = False,
        room: int | None = None,
    ) -> None:
        self.output = Path(os.path.realpath(output))
        self.partial = partial_folder(self.output)
        self._shards = lay_out(sections, shard_bytes)
        self._plan = [(section, shard) for shard in self._shards for section in shard.sections]
        self._entries: list[Entry] = []
        self._fingerprint = _digest(fingerprint)
        self._restart = restart
        self._room = sum(shard.nbytes for shard in self._shards) if room is None else room
        self.complete = is_finished(self.output, self._fingerprint, restart)
        with explained(self.partial):
            if self.complete:
                self._check_finished()
                tidy(self.output)
                return
            self._journal = self._open_journal()
            self._resume()

    @property
    def done(self) -> list[str]:
        """Names of the finished sections, in order; after a kill, those whose bytes still have their sha256."""
        return [entry.section for entry in self._entries]

    @property
    def work(self) -> Path:
        """A folder for what only this unfinished run needs; it goes when the output is published."""
        return self.partial / WORK

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """The tensors of the finished sections, in the order of their data."""
        return {name: info for entry in self._entries for name, info in entry.tensors.items()}

    @property
    def sha256(self) -> dict[str, str]:
        """The sha256 of each tensor's bytes, for the tensors of the finished sections."""
        return {name: value for entry in self._entries for name, value in entry.sha256.items()}

    def record(self, section: str) -> dict[str, Any]:
        """The record that the finished `section` was written with."""
        return self._entry(section).record

    def read(self, section: str) -> dict[str, Tensor]:
        """The tensors of the finished `section`."""
        return {name: read_tensor(info) for name, info in self._entry(section).tensors.items()}

    def write(self, section: str, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Append the next planned section and a JSON-able `record` about it; durable and verified on return.

        Raises ValueError for a section that is not the next one or differs from its plan, and InputError for a disk
        that is full or fails; what was finished before stays, and the same call may be made again.
        """
        planned, shard = self._next(section)
        _check_plan(planned, tensors)
        # As it will be read back, so that a resumed run sees the very same record.
        noted = json.loads(json.dumps(dict(record), allow_nan=False))
        remaining = sum(later.nbytes for later, _ in self._plan[len(self._entries) :])
        with explained(self.partial, remaining):
            infos, hashes = self._append(shard, tensors)
            entry = Entry(section, infos, hashes, noted)
            self._journal.append(entry.to_line())
        self._entries.append(entry)

    def finish(self, files: Mapping[str, str | bytes | Path], total_bytes: int | None = None) -> Path:
        """Write shard headers, the index and `files` (name in the folder -> content, or a file to copy), then publish.

        total_bytes: what all tensors together must come to. Returns the output folder.
        Raises InputError if they do not, or for a disk that is full or fails; ValueError while sections are missing.
        """
        if len(self._entries) < len(self._plan):
            raise ValueError(f"section {self._plan[len(self._entries)][0].name!r} has not been written")
        written = sum(info.nbytes for info in self.tensors.values())
        if total_bytes is not None and written != total_bytes:
            raise InputError(f"{self.output}: tensors come to {written} bytes, the plan says {total_bytes}: report it")
        for name in files:
            self._check_name(name)
        with explained(self.partial):
            for shard in self._shards:
                self._seal(shard)
            if len(self._shards) > 1:
                write_file(self.partial / INDEX, self._index(written))
            for name, content in files.items():
                write_file(self.partial / name, content)
            is_finished(self.output, self._fingerprint, self._restart)  # raises if somebody took the name meanwhile
            publish(self.partial, self.output)
        self._journal.close()
        self.complete = True
        return self.output

    def _check_finished(self) -> None:
        for shard in self._shards:
            held = read_header(self.output / shard.file_name).tensors
            if held.keys() != {name for section in shard.sections for name in section.tensors}:
                raise InputError(f"{self.output / shard.file_name}: was changed: give --restart to write it again")

    def _open_journal(self) -> Journal:
        os.makedirs(self.partial, exist_ok=True)
        if any(self.partial.iterdir()) and not (self.partial / JOURNAL).exists():
            raise InputError(f"{self.partial}: was not written by lmpress: move it away or give another output folder")
        return Journal(self.partial / JOURNAL)

    def _resume(self) -> None:
        header = {"journal": JOURNAL_VERSION, "fingerprint": self._fingerprint, "plan": digest(self._shards)}
        lines = self._journal.lines
        if lines and lines[0] != header and not self._restart:
            raise InputError(
                f"{self.partial}: holds an unfinished run of another recipe or model: finish that one, give another "
                "output folder, or --restart to discard it"
            )
        if not lines or self._restart:
            self._journal.keep(0)
            clear(self.partial)
            check_space(self.partial, self._room)
            self._journal.append(header)
            sync_folder(self.partial)
            sync_folder(self.partial.parent)
            return
        for line, (section, shard) in zip(lines[1:], self._plan, strict=False):
            entry = Entry.from_line(line, self.partial / shard.file_name)
            if entry.section != section.name or not _is_intact(entry):
                log.warning("%s: section %r is damaged and is written again", self.partial, section.name)
                break
            self._entries.append(entry)
        self._journal.keep(1 + len(self._entries))
        written = sum(info.nbytes for info in self.tensors.values())
        check_space(self.partial, max(0, self._room - written))

    def _entry(self, section: str) -> Entry:
        return self._entries[self.done.index(section)]

    def _next(self, section: str) -> tuple[Section, Shard]:
        if self.complete or len(self._entries) == len(self._plan):
            raise ValueError(f"section {section!r} comes after the last one")
        planned, shard = self._plan[len(self._entries)]
        if planned.name != section:
            raise ValueError(f"section {section!r} is not the next one, which is {planned.name!r}")
        return planned, shard

    def _held(self, shard: Shard) -> list[TensorInfo]:
        file = self.partial / shard.file_name
        return [info for info in self.tensors.values() if info.file == file]

    def _end(self, shard: Shard) -> int:
        return max((info.offset + info.nbytes for info in self._held(shard)), default=shard.data_start)

    def _append(self, shard: Shard, tensors: Mapping[str, Tensor]) -> tuple[dict[str, TensorInfo], dict[str, str]]:
        file = self.partial / shard.file_name
        offset = self._end(shard)
        infos: dict[str, TensorInfo] = {}
        hashes: dict[str, str] = {}
        # Widest first keeps every tensor aligned to its items, as long as sections come to whole 8-byte words.
        names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
        with opened(file, os.O_RDWR | os.O_CREAT) as descriptor:
            for name in names:
                tensor = tensors[name].detach().cpu().contiguous()
                data = tensor_bytes(tensor)
                infos[name] = TensorInfo(name, file, tensor.dtype, tuple(tensor.shape), offset, len(data))
                hashes[name] = hashlib.sha256(data).hexdigest()
                write_at(descriptor, data, offset)
                offset += len(data)
            os.fsync(descriptor)
            drop_cache(descriptor)
            for name, info in infos.items():
                if _hash_of(descriptor, info) != hashes[name]:
                    raise InputError(f"{file}: tensor {name!r} was read back changed: check the disk and its memory")
        sync_folder(self.partial)
        return infos, hashes

    def _seal(self, shard: Shard) -> None:
        """Fill in the reserved header, cut the file at the end of its data, and read the header back."""
        file = self.partial / shard.file_name
        held = self._held(shard)
        metadata = {"format": "pt", FINGERPRINT: self._fingerprint}
        with opened(file, os.O_RDWR) as descriptor:
            write_at(descriptor, encode_header(held, metadata, shard.data_start), 0)
            os.ftruncate(descriptor, self._end(shard))
            os.fsync(descriptor)
        if list(read_header(file).tensors.values()) != sorted(held, key=lambda info: (info.offset, info.nbytes)):
            raise InputError(f"{file}: header was read back changed: check the disk and its memory")

    def _index(self, total_bytes: int) -> str:
        weight_map = {name: info.file.name for name, info in sorted(self.tensors.items())}
        return json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2) + "\n"

    def _check_name(self, name: str) -> None:
        path = PurePosixPath(name)
        taken = {JOURNAL, INDEX, WORK, REPLACED, *(shard.file_name for shard in self._shards)}
        if path.is_absolute() or ".." in path.parts or not path.parts or path.parts[0] in taken:
            raise ValueError(f"{name!r} is not a name for a file beside the shards")


def _check_plan(planned: Section, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless `tensors` are those planned, in no more bytes, each with memory of its own."""
    if tensors.keys() != planned.tensors.keys():
        different = sorted(tensors.keys() ^ planned.tensors.keys())
        raise ValueError(f"section {planned.name!r} differs from its plan in {', '.join(different)}")
    owners: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in tensors.items():
        if tensor.nbytes > planned.tensors[name]:
            raise ValueError(f"{name!r} has {tensor.nbytes} bytes, more than the {planned.tensors[name]} planned")
        if tensor.dtype not in DTYPE_NAMES or len(json.dumps(tensor.shape)) > SHAPE_BYTES:
            raise ValueError(f"{name!r} is {tensor.dtype} {tuple(tensor.shape)}, which safetensors headers cannot say")
        if tensor.nbytes:
            owner = owners.setdefault((tensor.data_ptr(), tensor.shape), name)
            if owner != name:
                raise ValueError(f"{name!r} shares its memory with {owner!r}: tied tensors are stored once")


def _is_intact(entry: Entry) -> bool:
    """Whether the bytes on disk still have the sha256 that the journal notes."""
    for name, info in entry.tensors.items():
        if not info.file.exists():
            return False
        with opened(info.file) as descriptor:
            if _hash_of(descriptor, info) != entry.sha256[name]:
                return False
    return True


def _hash_of(descriptor: int, info: TensorInfo) -> str:
    found = hashlib.sha256()
    for chunk in read_chunks(descriptor, info.offset, info.nbytes):
        found.update(chunk)
    return found.hexdigest()


def finished(output: Path, fingerprint: str, restart: bool) -> bool:
    """Whether a Writer of this `fingerprint` would find its work done in `output`. Raises InputError as it would."""
    return is_finished(Path(os.path.realpath(output)), _digest(fingerprint), restart)


def _digest(fingerprint: str) -> str:
    return hashlib.sha256(fingerprint.encode()).hexdigest()
