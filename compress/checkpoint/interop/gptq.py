"""A W4A16 or W8A16 checkpoint in AutoGPTQ's layout (checkpoint_format "gptq"), its integers carried over as they are.

Per module, for b bits and G groups: `qweight` int32 [K * b / 32, N], packed along K; `scales` float16 [G, N]; `qzeros`
int32 [G, N * b / 32], zero point - 1, packed along N; `g_idx` int32 [K], the group of each column. w = (q - zero) * s
with unsigned q and zero. qweight is compressed-tensors' weight_packed turned around.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.interop.exported import Exported, Progress, Record, unwatched
from compress.checkpoint.interop.folder import Layout, Part, plain_names, plain_part, stored_parts, write
from compress.checkpoint.interop.grouped import half_scales, one_scheme, unpacked_linears
from compress.checkpoint.quantization_config import stored_shape
from compress.checkpoint.reader import Checkpoint
from compress.errors import InputError
from compress.formats.grid import TensorSpec
from compress.formats.scheme import Scheme

NAME = "gptq"
WORD = 32


def export(
    checkpoint: Checkpoint,
    schemes: dict[str, Scheme],
    output: Path,
    restart: bool = False,
    progress: Progress = unwatched,
) -> Exported:
    """Write `checkpoint`, whose modules are stored under `schemes`, to the folder `output`.

    Raises InputError for a scheme that GPTQ cannot say, more than one, and shapes that its packers refuse.
    """
    scheme = one_scheme(checkpoint, schemes, ("W4A16", "W4A16_ASYM", "W8A16"), NAME)
    plain = plain_names(checkpoint, schemes)
    parts = [plain_part(checkpoint, name) for name in plain]
    parts += [_part(checkpoint, module, scheme) for module in schemes]
    quantization: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": scheme.grid.bits,
        "group_size": scheme.grid.group_size or -1,
        "desc_act": False,
        "sym": scheme.grid.symmetric,
        "lm_head": "lm_head" in schemes,
        "checkpoint_format": "gptq",
    }
    left = unpacked_linears(checkpoint, plain)
    if left:
        quantization["dynamic"] = {f"-:^{re.escape(module)}$": {} for module in left}
    config = {**checkpoint.config, "quantization_config": quantization}
    files = {"quantize_config.json": json.dumps(quantization, indent=2) + "\n"}
    return write(checkpoint, output, Layout(NAME, parts, config, files), restart, progress)


def _part(checkpoint: Checkpoint, module: str, scheme: Scheme) -> Part:
    rows, columns = stored_shape(checkpoint, module, scheme)
    bits, groups = scheme.grid.bits, scheme.grid.groups(columns)
    if rows % WORD or columns % WORD:
        shape = f"has shape {[rows, columns]}, and GPTQ packs multiples of {WORD} both ways"
        raise InputError(f"{checkpoint.folder}: {module} {shape}: export it as 'dense' instead")
    specs = {
        f"{module}.qweight": TensorSpec(torch.int32, (columns * bits // WORD, rows)),
        f"{module}.qzeros": TensorSpec(torch.int32, (groups, rows * bits // WORD)),
        f"{module}.scales": TensorSpec(torch.float16, (groups, rows)),
        f"{module}.g_idx": TensorSpec(torch.int32, (columns,)),
    }

    def make(record: Record) -> Mapping[str, Tensor]:
        stored = stored_parts(checkpoint, module)
        record.carried += 1
        zeros = stored.get("weight_zero_point")
        ones = sum(1 << shift for shift in range(0, WORD, bits))
        if zeros is None:
            middle = ones * ((1 << (bits - 1)) - 1)
            qzeros = torch.full((groups, rows * bits // WORD), middle, dtype=torch.int32)
        else:
            qzeros = _minus_one(checkpoint, module, zeros.T, bits, ones)
        return {
            f"{module}.qweight": stored["weight_packed"].T.contiguous(),
            f"{module}.qzeros": qzeros,
            f"{module}.scales": half_scales(checkpoint, module, stored["weight_scale"], record),
            f"{module}.g_idx": torch.arange(columns, dtype=torch.int32) // (columns // groups),
        }

    return Part(specs, make)


def _minus_one(checkpoint: Checkpoint, module: str, words: Tensor, bits: int, ones: int) -> Tensor:
    """Packed zero points, each less one. Raises InputError for a zero point of 0: it would borrow from the next."""
    unsigned = words.to(torch.int64) & 0xFFFFFFFF
    for shift in range(0, WORD, bits):
        if bool((unsigned >> shift & (1 << bits) - 1 == 0).any()):
            raise InputError(
                f"{checkpoint.folder}: {module} has a zero point of 0, which GPTQ's layout cannot hold: export it as "
                "'awq' instead"
            )
    return (unsigned - ones).to(torch.int32)
