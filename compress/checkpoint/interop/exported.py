"""What an export tells of itself, whatever the format: what was carried over, what was rounded, and by how much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.header import DTYPE_NAMES
from compress.formats.scheme import Scheme

Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all

# Named in full up to here, then counted.
NAMED = 3


# GGUF's and safetensors' names of the float types that weights are exported in.
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def unwatched(stage: str, done: int, total: int) -> None:
    """The Progress that shows nothing."""


@dataclass
class Record:
    """What has been written so far.

    types: tensors per stored type. carried: linear layers whose integers and scales were laid out anew and not computed
    again. rounded: what became of a tensor that could not be stored as it was -> names. scales, scales_rounded: group
    scales carried over, and those float16 does not hold exactly; scale_error: the largest |stored / scale - 1|.
    """

    types: Counter[str] = field(default_factory=Counter)
    carried: int = 0
    rounded: dict[str, list[str]] = field(default_factory=dict)
    scales: int = 0
    scales_rounded: int = 0
    scale_error: float = 0.0

    def add(self, other: Mapping[str, Any]) -> None:
        """Add what another record, given as its fields, has noted."""
        self.types.update(other["types"])
        self.carried += other["carried"]
        for change, names in other["rounded"].items():
            self.rounded.setdefault(change, []).extend(names)
        self.scales += other["scales"]
        self.scales_rounded += other["scales_rounded"]
        self.scale_error = max(self.scale_error, other["scale_error"])

    def note_rounding(self, name: str, source: str, target: str) -> None:
        """Note that tensor `name` was rounded from one type to another."""
        self.rounded.setdefault(f"{source} to {target}", []).append(name)

    def note_scales(self, scale: Tensor, stored: Tensor) -> None:
        """Compare group scales with what float16 made of them."""
        exact, kept = scale.double(), stored.double()
        changed = exact != kept
        self.scales += scale.numel()
        self.scales_rounded += int(changed.sum())
        if bool(changed.any()):
            error = float((kept[changed] / exact[changed] - 1).abs().max())
            self.scale_error = max(self.scale_error, error)


@dataclass(frozen=True)
class Exported:
    """A finished export: the file or folder, its bytes, what it holds, and what a reader should know about it."""

    output: Path
    format: str
    nbytes: int
    record: Record
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """All of it as JSON."""
        record = self.record
        return {
            "output": str(self.output),
            "format": self.format,
            "bytes": self.nbytes,
            "tensors": dict(sorted(record.types.items())),
            "carried_layers": record.carried,
            "rounded": [{"change": change, "names": names} for change, names in record.rounded.items()],
            "scales": {"count": record.scales, "rounded": record.scales_rounded, "largest_error": record.scale_error},
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """All of it in words, a line each."""
        record = self.record
        held = ", ".join(f"{count} {kind}" for kind, count in sorted(record.types.items()))
        lines = [f"tensors: {held}"]
        if record.carried:
            lines.append(f"carried over unchanged: the integers of {record.carried} linear layers")
        if record.scales_rounded:
            share = f"{record.scales_rounded} of {record.scales} group scales"
            lines.append(f"rounded: {share} to float16, relative error up to {record.scale_error:.2g}")
        for change, names in record.rounded.items():
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            lines.append(f"rounded: {change}: {', '.join(names[:NAMED])}{more}")
        return [*lines, *(f"note: {note}" for note in self.notes)]


def in_words(scheme: Scheme) -> str:
    """A scheme for messages: "W4A16 in groups of 128"."""
    return f"{scheme.name} in groups of {scheme.grid.group_size or 'a row'}"


def type_name(dtype: torch.dtype) -> str:
    """A dtype as GGUF and safetensors headers spell it: F32, F16, BF16."""
    return DTYPE_NAMES[dtype]
