"""What GPTQ's and AWQ's layouts ask of a checkpoint alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from compress.checkpoint.interop.exported import Record, in_words
from compress.checkpoint.interop.folder import BLOCK
from compress.checkpoint.reader import Checkpoint
from compress.errors import InputError
from compress.formats.scheme import Scheme


def one_scheme(checkpoint: Checkpoint, schemes: Mapping[str, Scheme], allowed: Sequence[str], name: str) -> Scheme:
    """The scheme of all packed modules. Raises InputError for none, several, or one not in `allowed`."""
    if not schemes:
        raise InputError(
            f"{checkpoint.folder}: is not quantized: quantize it first, for {name} as {' or '.join(allowed)}"
        )
    for module, scheme in schemes.items():
        if scheme.name not in allowed:
            raise InputError(
                f"{checkpoint.folder}: {module} is {scheme.name}, and {name} holds {', '.join(allowed)}: export it as "
                "'dense' instead"
            )
    found = list(dict.fromkeys(schemes.values()))
    if len(found) > 1:
        told = " and ".join(map(in_words, found[:2]))
        raise InputError(f"{checkpoint.folder}: holds {told}, and {name} holds one: export it as 'dense' instead")
    return found[0]


def half_scales(checkpoint: Checkpoint, module: str, scale: Tensor, record: Record) -> Tensor:
    """Scales [N, G] as float16 [G, N]. Raises InputError for one beyond float16."""
    half = scale.half()
    if not bool(torch.isfinite(half).all()):
        raise InputError(f"{checkpoint.folder}: {module} has a scale beyond float16: export it as 'dense' instead")
    record.note_scales(scale, half)
    return half.T.contiguous()


def unpacked_linears(checkpoint: Checkpoint, plain: Sequence[str]) -> list[str]:
    """The modules inside of blocks whose weight matrix is stored as it is."""
    matrices = [name for name in plain if name.endswith(".weight") and len(checkpoint.tensors[name].shape) == 2]
    return [name.removesuffix(".weight") for name in matrices if BLOCK.match(name)]
