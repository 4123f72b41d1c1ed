"""What training leaves on the disk: the trained checkpoint, and states that an interrupted training goes on from.

Both are written by the checkpoint writer: verified as they are written, and under their name only when whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from compress.checkpoint import Checkpoint, Section, TensorInfo, Writer
from compress.checkpoint.disk import explained, tensor_bytes
from compress.checkpoint.header import read_header
from compress.checkpoint.layout import by_block
from compress.checkpoint.reader import CONFIG, WEIGHTS, read_tensor
from compress.checkpoint.strict_json import read_object
from compress.checkpoint.tokenizer import tokenizer_files
from compress.errors import InputError
from compress.training.student import Student

STATE = "state.json"
MOMENTS = "optimizer:"

Files = Mapping[str, str | bytes | Path]
# From the tensors as written, and the sha256 of their bytes, to what stands beside them.
Closing = Callable[[Mapping[str, TensorInfo], Mapping[str, str]], Files]


def write_trained(student: Student, output: Path, fingerprint: str, closing: Closing, restart: bool = False) -> Path:
    """Write `student` as a checkpoint with the tensors of its source: what lies outside the blocks, then the blocks.

    fingerprint: of all that decides the result. closing: gives the other files of the folder (config.json, the
    manifest with its hashes, the tokenizer's). Returns the output folder. Raises InputError for an output folder that
    is not ours to write or was begun with other weights, and for a disk that is full or fails.
    """
    parts = sections_of(student.source, student.network.block_names)
    writer = Writer(output, list(parts.values()), fingerprint, restart=restart)
    if writer.complete:
        return writer.output
    done = set(writer.done)
    for section in parts:
        stored = student.stored(section)
        if section not in done:
            writer.write(section, stored, {})
        elif any(writer.sha256[name] != _sha256(tensor) for name, tensor in stored.items()):
            raise InputError(f"{writer.partial}: was begun with other weights: give --restart to discard it")
    return writer.finish(closing(writer.tensors, writer.sha256), student.source.nbytes)


def sections_of(checkpoint: Checkpoint, blocks: Sequence[str]) -> dict[str, Section]:
    """What a writer is to plan for the tensors of `checkpoint` again: outside the blocks each alone, then by block."""
    stored = {name: {name: info.nbytes} for name, info in checkpoint.tensors.items()}
    return {name: Section(name, tensors) for name, tensors in by_block(blocks, stored).items()}


def copied_files(source: Checkpoint) -> dict[str, str | bytes | Path]:
    """The files of a checkpoint that training does not change: config.json and the tokenizer's."""
    return {file.name: file for file in (source.folder / CONFIG, *tokenizer_files(source.folder))}


def save_state(
    folder: Path, student: Student, optimizer: Optimizer | None, history: Mapping[str, Any], key: str
) -> None:
    """Keep in `folder` what is trained, the moments of `optimizer` and `history` (JSON types), in place of the last.

    The last one goes only when the new one is whole. key: of the run. Raises InputError for a disk that is full.
    """
    tensors = {name: one.detach() for name, one in student.parameters_by_name().items()}
    if optimizer is not None:
        tensors |= _moments(student, optimizer)
    earlier = _states(folder)
    number = int(earlier[-1].name) + 1 if earlier else 0
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    writer = Writer(folder / f"{number:06d}", [Section("state", sizes)], key, restart=True)
    writer.write("state", tensors, {})
    told = {"key": key, "optimizer": optimizer is not None, "history": dict(history), "sha256": writer.sha256}
    writer.finish({STATE: json.dumps(told, allow_nan=False)})
    with explained(folder):
        for state in earlier:
            shutil.rmtree(state)


def load_state(folder: Path, student: Student, optimizer: Optimizer | None, key: str) -> dict[str, Any] | None:
    """Put the state kept in `folder` into `student` and `optimizer`, and return its history; None where there is none.

    Raises InputError, before anything is changed, for a state that is damaged, of another run, or without the moments
    that `optimizer` needs.
    """
    states = _states(folder)
    if not states:
        return None
    told = read_object(states[-1] / STATE)
    mend = "remove that folder to begin again"
    if told.get("key") != key:
        raise InputError(f"{states[-1]}: is the state of another run: give another output folder, or {mend}")
    tensors = {name: read_tensor(info) for name, info in read_header(states[-1] / WEIGHTS).tensors.items()}
    if told.get("sha256") != {name: _sha256(tensor) for name, tensor in tensors.items()}:
        raise InputError(f"{states[-1] / WEIGHTS}: is damaged, its bytes are not those that were written: {mend}")
    if optimizer is not None and not told.get("optimizer"):
        raise InputError(f"{states[-1]}: holds weights without the optimizer's moments: {mend}")
    parameters = student.parameters_by_name()
    found = {name: tensor.shape for name, tensor in tensors.items() if not name.startswith(MOMENTS)}
    if found != {name: parameter.shape for name, parameter in parameters.items()}:
        raise InputError(f"{states[-1]}: holds other parameters than are trained: {mend}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    if optimizer is not None:
        _restore(student, optimizer, tensors)
    history = told["history"]
    assert isinstance(history, dict)
    return history


def _states(folder: Path) -> list[Path]:
    """The whole states in `folder`, oldest first: a newer one counts, should a kill have left two."""
    return sorted(path for path in folder.glob("*") if path.name.isdigit())


def _moments(student: Student, optimizer: Optimizer) -> dict[str, Tensor]:
    """What `optimizer` keeps per parameter, named after both."""
    found: dict[str, Tensor] = {}
    for name, parameter in student.parameters_by_name().items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            found[f"{MOMENTS}{kind}:{name}"] = value
    return found


def _restore(student: Student, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    names = {id(parameter): name for name, parameter in student.parameters_by_name().items()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    kept: dict[int, dict[str, Tensor]] = {}
    for stored, tensor in tensors.items():
        if stored.startswith(MOMENTS):
            kind, _, name = stored.removeprefix(MOMENTS).partition(":")
            kept.setdefault(order.index(name), {})[kind] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": kept})


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor_bytes(tensor.detach().cpu().contiguous())).hexdigest()
