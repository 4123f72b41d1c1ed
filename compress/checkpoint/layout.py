"""Where things will lie in the shards, decided from the plan alone, so that a resumed run decides the same.

A safetensors file begins with a header that names every tensor, but a streaming writer knows the tensors only at the
end. So each shard reserves room for the largest header its plan allows; the format lets spaces fill what is left over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compress.checkpoint.reader import WEIGHTS

SHAPE_BYTES = 72  # as JSON: three sizes of any magnitude, or eight of seven digits
# JSON around a tensor's name and shape: field names and dtype (53 characters), two offsets below 10**15.
ENTRY_BYTES = 53 + 2 * 15 + SHAPE_BYTES
FIXED_BYTES = 192  # the length field, braces, and metadata with a 64-character fingerprint
ALIGNMENT = 64


@dataclass(frozen=True)
class Section:
    """Tensors that are written and made durable together: name -> planned bytes, an upper bound."""

    name: str
    tensors: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Planned bytes of all its tensors."""
        return sum(self.tensors.values())


@dataclass(frozen=True)
class Shard:
    """One safetensors file: consecutive sections behind `data_start` bytes that are kept for the header."""

    file_name: str
    sections: tuple[Section, ...]
    data_start: int

    @property
    def nbytes(self) -> int:
        """Planned bytes of the whole file."""
        return self.data_start + sum(section.nbytes for section in self.sections)


def by_block(blocks: Sequence[str], stored: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Bytes of tensors by section, in writing order: what lies outside the `blocks`, each alone, then block by block.

    stored: a weight's name -> the tensors that it is stored as.
    """
    inside: dict[str, dict[str, int]] = {block: {} for block in blocks}
    outside: dict[str, dict[str, int]] = {}
    for name, parts in stored.items():
        owner = next((block for block in blocks if name.startswith(block + ".")), None)
        if owner is None:
            outside[name] = dict(parts)
        else:
            inside[owner].update(parts)
    return outside | inside


def lay_out(sections: Sequence[Section], shard_bytes: int) -> tuple[Shard, ...]:
    """Distribute `sections`, in order, over shards of at most `shard_bytes` of data; a larger section is alone in one.

    Raises ValueError for a plan without tensors or one that names a section or a tensor twice.
    """
    _refuse_duplicates("section", [section.name for section in sections])
    _refuse_duplicates("tensor", [name for section in sections for name in section.tensors])
    if not any(section.tensors for section in sections):
        raise ValueError("the plan has no tensors")
    groups: list[list[Section]] = [[]]
    filled = 0
    for section in sections:
        if filled and section.nbytes and filled + section.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(section)
        filled += section.nbytes
    return tuple(
        Shard(_file_name(number, len(groups)), tuple(group), _header_area(group))
        for number, group in enumerate(groups, start=1)
    )


def digest(shards: Sequence[Shard]) -> str:
    """A fingerprint of the plan: two plans with the same one put every section at the same place."""
    plan = [[shard.file_name, [[section.name, section.tensors] for section in shard.sections]] for shard in shards]
    return hashlib.sha256(json.dumps(plan).encode()).hexdigest()


def _refuse_duplicates(kind: str, names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"the plan names {kind} {name!r} twice")
        seen.add(name)


def _file_name(number: int, count: int) -> str:
    return WEIGHTS if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _header_area(sections: Sequence[Section]) -> int:
    names = [name for section in sections for name in section.tensors]
    needed = FIXED_BYTES + sum(len(json.dumps(name)) + ENTRY_BYTES for name in names)
    return -(-needed // ALIGNMENT) * ALIGNMENT
