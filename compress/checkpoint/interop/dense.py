"""A quantized checkpoint as the float model it stands for, which any loader of Hugging Face folders reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint.interop.exported import FLOATS, Exported, Progress, Record, unwatched
from compress.checkpoint.interop.folder import Layout, Part, write
from compress.checkpoint.reader import Checkpoint
from compress.checkpoint.source import Dequantized, dequantized, dominant_dtype
from compress.errors import USAGE, InputError, did_you_mean
from compress.formats.grid import TensorSpec
from compress.formats.scheme import Scheme

NAME = "dense"
AUTO = "auto"


def export(
    checkpoint: Checkpoint,
    schemes: dict[str, Scheme],
    output: Path,
    kind: str = AUTO,
    restart: bool = False,
    progress: Progress = unwatched,
) -> Exported:
    """Write the float weights behind `checkpoint`, whose modules are stored under `schemes`, to the folder `output`.

    kind: of every floating-point tensor, from FLOATS; "auto" gives dequantized weights the model's own dtype and leaves
    the other tensors alone. Only F32 holds a product of an integer and a scale without rounding.
    Raises InputError for a checkpoint that is not quantized, an unknown kind, or values that the kind cannot hold.
    """
    if not schemes:
        raise InputError(f"{checkpoint.folder}: is not quantized: it is a dense checkpoint already")
    if kind not in (AUTO, *FLOATS):
        known = ", ".join((AUTO, *FLOATS))
        raise InputError(f"--type: {kind!r} is not known{did_you_mean(kind, FLOATS)} For {NAME}: {known}", USAGE)
    wanted = FLOATS.get(kind)
    dtype = wanted or _model_dtype(checkpoint)
    floats = dequantized(checkpoint, schemes, torch.float32)
    parts = [_part(floats, name, wanted, dtype) for name in floats.tensors]
    config = {key: value for key, value in floats.config.items() if key != "torch_dtype"}
    config["dtype"] = str(dtype).removeprefix("torch.")
    notes = () if dtype is torch.float32 else (f"dequantized weights were rounded to {config['dtype']}",)
    return write(checkpoint, output, Layout(f"{NAME} {kind}", parts, config, notes=notes), restart, progress)


def _model_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """What config.json says, else what most of the floating-point tensors are."""
    said = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    named = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS.values()}
    return named.get(str(said)) or dominant_dtype(checkpoint.tensors)


def _part(floats: Dequantized, name: str, wanted: torch.dtype | None, dtype: torch.dtype) -> Part:
    """How tensor `name` is written: packed ones in `dtype`, others in `wanted`, or as they are where that is None."""
    info = floats.tensors[name]
    packed = name not in floats.stored
    target = dtype if packed else (wanted or info.dtype) if info.dtype.is_floating_point else info.dtype

    def make(record: Record) -> Mapping[str, Tensor]:
        tensor = floats.read(name)
        converted = tensor.to(target)
        if target.is_floating_point and bool(torch.isinf(converted).any()) and not bool(torch.isinf(tensor).any()):
            raise InputError(f"{floats.folder}: tensor {name!r} holds a value beyond {target}: give --type F32 or BF16")
        return {name: converted}

    return Part({name: TensorSpec(target, info.shape)}, make)
