"""Whether the shards hold what config.json describes: tensors that are missing, belong nowhere, or differ in shape."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

from compress.checkpoint.header import TensorInfo
from compress.errors import InputError

# Tables that older checkpoints stored and every loader computes: rotary frequencies and causal masks.
DERIVED = re.compile(r"\.(rotary_emb\.inv_freq|(attn|attention)\.(bias|masked_bias))$")
MEND = "copy or export the folder again"


def strangers(found: Iterable[str], wanted: Container[str]) -> tuple[list[str], list[str]]:
    """The names in `found` that are not `wanted`: those nobody knows, and tables that loaders compute themselves."""
    extra = [name for name in found if name not in wanted]
    derived = [name for name in extra if DERIVED.search(name)]
    return [name for name in extra if name not in derived], derived


def refuse_missing(folder: Path, names: Sequence[str]) -> None:
    """Raise InputError if there are `names`: tensors that the model needs and the shards do not hold."""
    _refuse(folder, names, "is missing", "the shards are not the whole model that config.json describes")


def refuse_extra(folder: Path, names: Sequence[str]) -> None:
    """Raise InputError if there are `names`: tensors that the model has no place for."""
    _refuse(folder, names, "belongs to no layer", "config.json or its quantization_config tells of another model")


def refuse_shape(info: TensorInfo, shape: tuple[int, ...]) -> None:
    """Raise InputError if a stored tensor has another shape than the model's."""
    if info.shape != shape:
        shapes = f"has shape {list(info.shape)}, and config.json asks for {list(shape)}"
        raise InputError(f"{info.file}: tensor {info.name!r} {shapes}: {MEND}")


def _refuse(folder: Path, names: Sequence[str], what: str, why: str) -> None:
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise InputError(f"{folder}: tensor {names[0]!r} {what}{more}: {why}: {MEND}")
