"""A checkpoint folder written from another one, block by block, through the resumable writer."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.checkpoint.interop.exported import Exported, Progress, Record, type_name
from compress.checkpoint.layout import Section
from compress.checkpoint.output import refuse_overlap
from compress.checkpoint.reader import CONFIG, Checkpoint
from compress.checkpoint.source import identity
from compress.checkpoint.tokenizer import tokenizer_files
from compress.checkpoint.writer import Writer
from compress.formats.grid import TensorSpec
from compress.formats.scheme import Scheme

SHARD_BYTES = 4 << 30
BLOCK = re.compile(r".*?\.\d+(?=\.)")


@dataclass(frozen=True)
class Part:
    """Tensors that come into being together: name -> dtype and shape, and what makes them, noting what it rounds."""

    specs: dict[str, TensorSpec]
    make: Callable[[Record], Mapping[str, Tensor]]

    @property
    def block(self) -> str:
        """The decoder block it belongs to, or its own first tensor outside of one."""
        name = next(iter(self.specs))
        found = BLOCK.match(name)
        return found[0] if found else name


@dataclass(frozen=True)
class Layout:
    """Everything of a folder to be written. label: the format and what else decides the bytes."""

    label: str
    parts: Sequence[Part]
    config: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def write(checkpoint: Checkpoint, output: Path, layout: Layout, restart: bool, progress: Progress) -> Exported:
    """Write `layout`, made from `checkpoint`, to the folder `output`. Holds one block at a time.

    A killed export goes on by the same call. Raises InputError for an output that is taken and a disk that fails.
    """
    refuse_overlap(output, checkpoint.folder)
    blocks: dict[str, list[Part]] = {}
    for part in layout.parts:
        blocks.setdefault(part.block, []).append(part)
    sizes = {name: _sizes(parts) for name, parts in blocks.items()}
    sections = [Section(name, tensors) for name, tensors in sizes.items()]
    nbytes = sum(section.nbytes for section in sections)
    mark = f"export {layout.label} lmpress {version('lmpress')} {identity(checkpoint)}"
    writer = Writer(output, sections, mark, SHARD_BYTES, restart)
    name = layout.label.partition(" ")[0]
    kinds = Counter(type_name(spec.dtype) for part in layout.parts for spec in part.specs.values())
    if writer.complete:
        return Exported(writer.output, name, nbytes, Record(kinds), ("it was there already", *layout.notes))
    done = 0
    for section in sections:
        if section.name not in writer.done:
            record = Record()
            tensors = {key: value for part in blocks[section.name] for key, value in part.make(record).items()}
            writer.write(section.name, tensors, asdict(record))
        done += section.nbytes
        progress("writing", done, nbytes)
    total = Record(kinds)
    for section in sections:
        total.add(writer.record(section.name))
    files: dict[str, str | bytes | Path] = {file.name: file for file in tokenizer_files(checkpoint.folder)}
    files |= layout.files
    files[CONFIG] = json.dumps(layout.config, indent=2, ensure_ascii=False) + "\n"
    return Exported(writer.finish(files, nbytes), name, nbytes, total, layout.notes)


def plain_part(checkpoint: Checkpoint, name: str) -> Part:
    """A tensor as it is."""
    info = checkpoint.tensors[name]
    return Part({name: TensorSpec(info.dtype, info.shape)}, lambda record: {name: checkpoint.read(name)})


def plain_names(checkpoint: Checkpoint, schemes: Mapping[str, Scheme]) -> list[str]:
    """The tensors that belong to no packed weight."""
    return [name for name in checkpoint.tensors if name.endswith(".bias") or name.rpartition(".")[0] not in schemes]


def stored_parts(checkpoint: Checkpoint, module: str) -> dict[str, Tensor]:
    """The tensors that stand for the weight of `module`, by suffix."""
    prefix = module + "."
    names = [name for name in checkpoint.tensors if name.startswith(prefix) and name != f"{prefix}bias"]
    return {name.removeprefix(prefix): checkpoint.read(name) for name in names}


def _sizes(parts: Sequence[Part]) -> dict[str, int]:
    return {name: spec.nbytes for part in parts for name, spec in part.specs.items()}
