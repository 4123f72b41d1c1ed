"""A W4A16 checkpoint in AutoAWQ's layout (version "gemm"), its integers carried over as they are.

Per module: `qweight` int32 [K, N / 8] and `qzeros` int32 [K / g, N / 8], packed along N, nibble i of a word holding
column 8 * c + ORDER[i]; `scales` float16 [K / g, N]. w = (q - zero) * scale with unsigned q and zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint.interop.exported import Exported, Progress, Record, unwatched
from compress.checkpoint.interop.folder import Layout, Part, plain_names, plain_part, stored_parts, write
from compress.checkpoint.interop.grouped import half_scales, one_scheme, unpacked_linears
from compress.checkpoint.quantization_config import stored_shape
from compress.checkpoint.reader import Checkpoint
from compress.errors import InputError
from compress.formats import format_named
from compress.formats.grid import TensorSpec
from compress.formats.scheme import Scheme

NAME = "awq"
PER_WORD = 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
HEAD = "lm_head"


def export(
    checkpoint: Checkpoint,
    schemes: dict[str, Scheme],
    output: Path,
    restart: bool = False,
    progress: Progress = unwatched,
) -> Exported:
    """Write `checkpoint`, whose modules are stored under `schemes`, to the folder `output`.

    Raises InputError for a scheme that AWQ cannot say, more than one, and shapes that it cannot pack.
    """
    scheme = one_scheme(checkpoint, schemes, ("W4A16", "W4A16_ASYM"), NAME)
    if scheme.grid.group_size is None:
        raise InputError(
            f"{checkpoint.folder}: has one scale per row, and AWQ wants groups: export it as 'gptq' instead"
        )
    if HEAD in schemes:
        raise InputError(
            f"{checkpoint.folder}: {HEAD} is quantized, and AWQ leaves it alone: export it as 'gptq' instead"
        )
    plain = plain_names(checkpoint, schemes)
    parts = [plain_part(checkpoint, name) for name in plain]
    parts += [_part(checkpoint, module, scheme) for module in schemes]
    quantization = {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": scheme.grid.group_size,
        "zero_point": True,
        "modules_to_not_convert": [HEAD, *unpacked_linears(checkpoint, plain)],
    }
    config = {**checkpoint.config, "quantization_config": quantization}
    return write(checkpoint, output, Layout(NAME, parts, config), restart, progress)


def pack_columns(values: Tensor) -> Tensor:
    """Signed int8 [R, C] -> int32 [R, C / 8]: value + 8 in four bits, in AWQ's order of columns."""
    nibbles = (values.to(torch.int64) + 8).view(values.shape[0], -1, PER_WORD)[..., list(ORDER)]
    return (nibbles << torch.arange(0, 32, 4)).sum(dim=-1).to(torch.int32)


def _part(checkpoint: Checkpoint, module: str, scheme: Scheme) -> Part:
    rows, columns = stored_shape(checkpoint, module, scheme)
    groups = scheme.grid.groups(columns)
    if rows % PER_WORD:
        shape = f"has {rows} output rows, and AWQ packs multiples of {PER_WORD}"
        raise InputError(f"{checkpoint.folder}: {module} {shape}: export it as 'dense' instead")
    specs = {
        f"{module}.qweight": TensorSpec(torch.int32, (columns, rows // PER_WORD)),
        f"{module}.qzeros": TensorSpec(torch.int32, (groups, rows // PER_WORD)),
        f"{module}.scales": TensorSpec(torch.float16, (groups, rows)),
    }

    def make(record: Record) -> Mapping[str, Tensor]:
        quantized = format_named(scheme.format).unpack(stored_parts(checkpoint, module), scheme.grid)
        record.carried += 1
        zero = torch.zeros_like(quantized.scale, dtype=torch.int8) if quantized.zero is None else quantized.zero
        return {
            f"{module}.qweight": pack_columns(quantized.q.T.contiguous()),
            f"{module}.qzeros": pack_columns(zero.T.contiguous()),
            f"{module}.scales": half_scales(checkpoint, module, quantized.scale, record),
        }

    return Part(specs, make)
