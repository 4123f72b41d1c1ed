"""A checkpoint with 2:4 weights in compressed-tensors' own formats: what is pruned becomes a zero code.

transformers, vLLM and others read the result, at the size of dense integers: `pack-quantized` for W4A16 and W8A16,
`int-quantized` for W8A8. Pruned floats become plain floats with zeros. Integers and scales are carried over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint import quantization_config
from compress.checkpoint.interop.exported import Exported, Progress, Record, unwatched
from compress.checkpoint.interop.folder import Layout, Part, plain_names, plain_part, stored_parts, write
from compress.checkpoint.quantization_config import stored_shape
from compress.checkpoint.reader import Checkpoint
from compress.errors import InputError
from compress.formats import format_named, sparse24
from compress.formats.grid import FLOAT_BITS, TensorSpec
from compress.formats.scheme import SCHEMES, Scheme

NAME = "compressed-tensors"


def export(
    checkpoint: Checkpoint,
    schemes: dict[str, Scheme],
    output: Path,
    restart: bool = False,
    progress: Progress = unwatched,
) -> Exported:
    """Write `checkpoint`, whose modules are stored under `schemes`, to the folder `output`.

    Raises InputError where nothing is pruned, and for outlier columns, which compressed-tensors cannot say.
    """
    sparse = {module: scheme for module, scheme in schemes.items() if scheme.format == sparse24.NAME}
    if not sparse:
        raise InputError(f"{checkpoint.folder}: holds no 2:4 weights: there is nothing to be written otherwise")
    dense = {module: dense_scheme(scheme) for module, scheme in schemes.items()}
    odd = next((module for module, scheme in schemes.items() if scheme.threshold is not None), None)
    if odd is not None:
        raise InputError(
            f"{checkpoint.folder}: {odd} has outlier columns, which compressed-tensors cannot say: export it as "
            "'dense' instead"
        )
    parts = [plain_part(checkpoint, name) for name in plain_names(checkpoint, sparse)]
    parts += [_part(checkpoint, module, scheme, dense[module]) for module, scheme in sparse.items()]
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    kept = {module: scheme for module, scheme in dense.items() if scheme is not None}
    if kept:
        left = [module for module, scheme in dense.items() if scheme is None]
        ignored = [*_strings(checkpoint.config["quantization_config"].get("ignore")), *left]
        config["quantization_config"] = quantization_config.build(kept, ignored, torch.bfloat16)
    return write(checkpoint, output, Layout(NAME, parts, config), restart, progress)


def dense_scheme(scheme: Scheme) -> Scheme | None:
    """`scheme` without its pattern, as compressed-tensors has it; None for floats."""
    if scheme.format != sparse24.NAME:
        return scheme
    if scheme.grid.bits == FLOAT_BITS:
        return None
    known = SCHEMES[scheme.name.partition("+")[0]]
    return replace(known, grid=scheme.grid)


def _part(checkpoint: Checkpoint, module: str, scheme: Scheme, dense: Scheme | None) -> Part:
    shape = stored_shape(checkpoint, module, scheme)
    if dense is None:
        dtype = checkpoint.tensors[f"{module}.weight_values"].dtype
        specs = {"weight": TensorSpec(dtype, shape)}
    else:
        reason = format_named(dense.format).refuses(shape, dense.grid)
        if reason is not None:
            raise InputError(f"{checkpoint.folder}: {module}: {reason}: export it as 'dense' instead")
        dtype = checkpoint.tensors[f"{module}.weight_scale"].dtype
        specs = format_named(dense.format).specs(shape, dense.grid, dtype)

    def make(record: Record) -> Mapping[str, Tensor]:
        quantized = sparse24.unpack(stored_parts(checkpoint, module), scheme.grid)
        record.carried += 1
        made = {"weight": quantized.q} if dense is None else format_named(dense.format).pack(quantized, dense.grid)
        return {f"{module}.{suffix}": tensor for suffix, tensor in made.items()}

    return Part({f"{module}.{suffix}": spec for suffix, spec in specs.items()}, make)


def _strings(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []
