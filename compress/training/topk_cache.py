"""The head of a teacher's next-token distributions on disk: written once, memory-mapped by every later training.

A position is one record of `bytes_per_token` bytes, little-endian, k entries in descending order of probability:

    indices      k x uint16    the lower 16 bits of each token id
    log_probs    k x float16   natural logarithms
    correction   float16       to be added to all k log-probabilities
    high         uint8         the upper bits of each id: none for a vocabulary up to 2**16; two bits, four ids to a
                               byte with the first lowest, up to 2**18; a byte each up to 2**24

The correction restores the mass that the k entries lost or won by rounding, so that what they lack of 1 is the mass of
all other tokens, as it was. What rounding is left is below half a unit in the eleventh digit of each logarithm: a
divergence of at most about 2**-23 * sum p log(p)**2, 1e-7 nats a token where a model reads prose.

The folder is one of `compress.checkpoint.Writer`: safetensors shards with one uint8 tensor [sequences, length, record]
per section, and cache.json, which says what the cache is of and the sha256 of every section.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.checkpoint import Section, TensorInfo, Writer
from compress.checkpoint.disk import explained, write_file
from compress.checkpoint.header import read_header
from compress.checkpoint.output import WORK, partial_folder
from compress.checkpoint.strict_json import read_object
from compress.distill import TopK
from compress.errors import USAGE, InputError

HEADER = "cache.json"
VERSION = 1
PASS = 2048  # positions that go through the teacher at a time
SECTIONS = 1024  # at most so many in a cache: each costs three syncs, and the journal is read as a whole
SMALLEST = float(np.finfo(np.float16).min)

Records = NDArray[np.uint8]
Head = Callable[[Tensor, Tensor], TopK]


@dataclass(frozen=True)
class CacheKey:
    """What decides a cache. teacher, text: a sha256 of either; k: entries of a position, of ids below `vocabulary`."""

    teacher: str
    text: str
    k: int
    vocabulary: int

    @property
    def sha256(self) -> str:
        """One hash of it all, and of the version of the format."""
        return hashlib.sha256(json.dumps([VERSION, asdict(self)], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Cache:
    """An open cache. sections: its records, uint8 [sequences, length, record], mapped; all but the last are alike."""

    key: CacheKey
    sections: tuple[Records, ...]

    def read(self, rows: Tensor, columns: Tensor) -> TopK:
        """The heads [m, k], on the CPU, at positions `columns` int64 [m] of sequences `rows` int64 [m]."""
        row, column = rows.cpu().numpy(), columns.cpu().numpy()
        section, inside = np.divmod(row, len(self.sections[0]))
        records = np.empty((len(row), bytes_per_token(self.key.k, self.key.vocabulary)), np.uint8)
        for number in np.unique(section):
            chosen = section == number
            records[chosen] = self.sections[number][inside[chosen], column[chosen]]
        return unpack(records, self.key.k, self.key.vocabulary)


def bytes_per_token(k: int, vocabulary: int) -> int:
    """Bytes of the record of one position: k entries of ids below `vocabulary`, and the correction."""
    return 4 * k + 2 + ceil(k * _high_bits(vocabulary) / 8)


def head_of(logits: Tensor, k: int) -> TopK:
    """The k most probable tokens of each row of `logits` [n, V], float32 log-probabilities, descending."""
    logits = logits.float()
    values, indices = logits.topk(k, dim=-1)
    return TopK(values - logits.logsumexp(dim=-1, keepdim=True), indices)


def pack(head: TopK, vocabulary: int) -> Records:
    """Records [n, bytes_per_token] of the head [n, k] of a distribution over `vocabulary` tokens."""
    exact = head.log_probs.double().cpu().clamp(min=SMALLEST)
    rounded = exact.half()
    correction = (exact.logsumexp(1, keepdim=True) - rounded.double().logsumexp(1, keepdim=True)).half()
    ids = head.indices.cpu().numpy()
    parts = [_bytes(ids & 0xFFFF, "<u2"), _bytes(rounded.numpy(), "<f2"), _bytes(correction.numpy(), "<f2")]
    high = ids >> 16
    if _high_bits(vocabulary) == 2:
        quads = np.pad(high, ((0, 0), (0, -high.shape[1] % 4))).reshape(len(high), -1, 4)
        parts.append(_bytes((quads << np.array([0, 2, 4, 6])).sum(axis=2), "u1"))
    elif _high_bits(vocabulary) == 8:
        parts.append(_bytes(high, "u1"))
    return np.concatenate(parts, axis=1)


def unpack(records: Records, k: int, vocabulary: int) -> TopK:
    """The head [n, k] that `pack` stored in `records`; log-probabilities are float32."""
    ids = records[:, : 2 * k].view("<u2").astype(np.int64)
    log_probs = records[:, 2 * k : 4 * k].view("<f2").astype(np.float32)
    correction = records[:, 4 * k : 4 * k + 2].view("<f2").astype(np.float32)
    high = records[:, 4 * k + 2 :].astype(np.int64)
    if _high_bits(vocabulary) == 2:
        high = (high[:, :, None] >> np.array([0, 2, 4, 6]) & 3).reshape(len(high), -1)[:, :k]
    if _high_bits(vocabulary):
        ids |= high << 16
    return TopK(torch.from_numpy(log_probs + correction), torch.from_numpy(ids))


def is_cached(folder: Path, key: CacheKey) -> bool:
    """Whether `folder` holds the finished cache of `key`.

    Raises InputError for one of another teacher, text, k or vocabulary, finished or not, and for a folder of other
    things.
    """
    folder = Path(os.path.realpath(folder))
    if (folder / HEADER).exists():
        if _refuse_other(folder, folder / HEADER, key).get("finished") is not True:
            raise InputError(f"{folder / HEADER}: the cache is not finished: delete {folder} and run again")
        return True
    if folder.is_file() or (folder.exists() and any(folder.iterdir())):
        raise InputError(f"{folder}: holds something else than a teacher's cache: give another folder as teacher.cache")
    unfinished = partial_folder(folder) / WORK / HEADER
    if unfinished.exists():
        _refuse_other(partial_folder(folder), unfinished, key)
    return False


def write(folder: Path, key: CacheKey, ids: Tensor, head: Head, progress: Callable[[int, int], None]) -> None:
    """Write the cache of `key` to `folder`, or what a run that was interrupted has left to do; nothing if it is there.

    ids: int64 [N, T], the text. head: gives the TopK [S * T, k] of sequences: their numbers [S] and ids [S, T].
    progress: told how many sequences are done, of how many. The same arguments give the same bytes, however often the
    work was interrupted: it is done, and kept, in sections that depend on N and T alone.
    Raises InputError for a folder of other things, k beyond the vocabulary, and a disk that is full or fails; the
    folder has its name only when complete, and the same call then goes on.
    """
    folder = Path(os.path.realpath(folder))
    if not 0 < key.k <= key.vocabulary <= 1 << 24:
        raise InputError(
            f"teacher.top_k: is {key.k}, with a vocabulary of {key.vocabulary}: give 1 to that many", USAGE
        )
    if is_cached(folder, key):
        return
    count, length = ids.shape
    record = bytes_per_token(key.k, key.vocabulary)
    sequences = max(1, PASS // length)
    rows = torch.arange(count).split(sequences * max(1, ceil(count / (sequences * SECTIONS))))
    names = [f"{number:06d}" for number in range(len(rows))]
    plan = [Section(name, {name: len(one) * length * record}) for name, one in zip(names, rows, strict=True)]
    writer = Writer(folder, plan, key.sha256)
    description = {"version": VERSION, **asdict(key), "key": key.sha256, "bytes_per_token": record}
    description |= {"sequences": count, "length": length}
    with explained(writer.partial):
        write_file(writer.work / f"{HEADER}.new", json.dumps(description | {"finished": False}) + "\n")
        os.replace(writer.work / f"{HEADER}.new", writer.work / HEADER)
    for name, section in list(zip(names, rows, strict=True))[len(writer.done) :]:
        progress(int(section[0]), count)
        heads = [head(some, ids[some]) for some in section.split(sequences)]
        packed = np.concatenate([pack(one, key.vocabulary) for one in heads]).reshape(-1, length, record)
        writer.write(name, {name: torch.from_numpy(packed)}, {})
    progress(count, count)
    finished = description | {"finished": True, "sha256": writer.sha256}
    writer.finish({HEADER: json.dumps(finished, indent=1) + "\n"})


def open_cache(folder: Path, key: CacheKey) -> Cache:
    """The finished cache of `key` in `folder`, mapped, every section held against its sha256.

    Raises InputError for a cache that is missing, unfinished, damaged or of something else.
    """
    folder = Path(folder)
    if not is_cached(folder, key):
        raise InputError(f"{folder}: holds no finished cache of a teacher: run the training that writes it")
    header = read_object(folder / HEADER)
    hashes = header.get("sha256")
    shards = sorted(folder.glob("*.safetensors"))
    tensors = {name: info for shard in shards for name, info in read_header(shard).tensors.items()}
    if not isinstance(hashes, dict) or not hashes or hashes.keys() != tensors.keys():
        raise _damaged(folder / HEADER, "does not list the sections that are there")
    with explained(folder):
        mapped = {shard: np.memmap(shard, np.uint8, "r") for shard in shards}
    sections = tuple(_section(tensors[name], mapped, hashes[name]) for name in sorted(tensors))
    position = (header.get("length"), bytes_per_token(key.k, key.vocabulary))
    alike = all(len(section) == len(sections[0]) for section in sections[:-1])
    if not alike or any(section.shape[1:] != position for section in sections):
        raise _damaged(folder / HEADER, "does not fit the shapes of the sections")
    return Cache(key, sections)


def _section(info: TensorInfo, mapped: Mapping[Path, Records], sha256: str) -> Records:
    data = mapped[info.file][info.offset : info.offset + info.nbytes]
    if info.dtype != torch.uint8:
        raise _damaged(info.file, f"section {info.name!r} is {info.dtype}, not torch.uint8")
    if hashlib.sha256(data.data).hexdigest() != sha256:
        raise _damaged(info.file, f"section {info.name!r} has another sha256 than {HEADER} notes")
    return data.reshape(info.shape)


def _damaged(file: Path, what: str) -> InputError:
    return InputError(f"{file}: is damaged, {what}: delete {file.parent} and run again, which writes it anew")


def _refuse_other(folder: Path, file: Path, key: CacheKey) -> dict[str, Any]:
    """The header `file` of what is in `folder`. Raises InputError, naming what differs, unless it is of `key`."""
    header = read_object(file)
    differences = {
        "version": f"has version {header.get('version')!r} of the format, not {VERSION}",
        "teacher": "is of another teacher",
        "text": "is of another text",
        "k": f"has k = {header.get('k')!r}, not {key.k}",
        "vocabulary": f"is over a vocabulary of {header.get('vocabulary')!r}, not {key.vocabulary}",
    }
    wanted = {"version": VERSION, **asdict(key)}
    found = [text for field, text in differences.items() if header.get(field) != wanted[field]]
    if found:
        raise InputError(
            f"{file}: the cache {' and '.join(found)}: give another folder as teacher.cache, or delete {folder} to "
            "have it written anew"
        )
    return header


def _high_bits(vocabulary: int) -> int:
    """Bits of a token id that two bytes do not hold, as they are stored."""
    if vocabulary <= 1 << 16:
        return 0
    return 2 if vocabulary <= 1 << 18 else 8


def _bytes(values: NDArray[Any], dtype: str) -> Records:
    """`values` [n, m] as `dtype`, its bytes [n, m * itemsize]."""
    return np.ascontiguousarray(values.astype(dtype)).view(np.uint8)
