"""Checkpoint folders in Hugging Face's layout: config.json beside safetensors shards, read one tensor at a time.

Tensors are read with pread into memory of their own. A memory map would count every page of the file as resident, so
that peak memory would follow the model instead of its largest block. Nothing is ever unpickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.disk import opened, read_into, tensor_bytes
from compress.checkpoint.header import Header, TensorInfo, read_header
from compress.checkpoint.strict_json import read_object
from compress.errors import InputError, did_you_mean

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint folder: its config.json and where each tensor lies. No weight is in memory."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> Tensor:
        """The tensor `name`, in memory of its own. Raises InputError for a name that is not there."""
        return read_tensor(self._info(name))

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` (exclusive) of the tensor `name`, without reading the others."""
        return read_tensor(self._info(name), start, stop)

    @property
    def stored(self) -> dict[str, TensorInfo]:
        """The tensors as they lie on the disk: here, all of them."""
        return self.tensors

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The quantization_config of config.json, None for an unquantized model."""
        return self.config.get("quantization_config")

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            near = did_you_mean(name, self.tensors)
            raise InputError(f"{self.folder}: holds no tensor {name!r}{near}: give a complete checkpoint")
        return self.tensors[name]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint folder, reading config.json, the index and the shard headers.

    Raises InputError, naming file, field and mend, for a folder that is missing, lacks a part, holds weights only as
    pickles, or whose files contradict each other.
    """
    folder = Path(folder)
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "there is no such folder"
        raise InputError(f"{folder}: {problem}: give the folder of a checkpoint, the one with {CONFIG}")
    config = _read_config(folder / CONFIG)
    tensors = _read_index(folder) if (folder / INDEX).exists() else _read_single(folder)
    if not tensors:
        raise InputError(f"{folder / WEIGHTS}: holds no tensors: copy or download it again")
    return Checkpoint(folder, config, tensors)


def read_tensor(info: TensorInfo, start: int = 0, stop: int | None = None) -> Tensor:
    """The stored tensor, or its rows `start` to `stop`, in memory of its own.

    Raises InputError for a file that cannot be read or has become shorter, ValueError for rows that are not there.
    """
    shape, offset, nbytes = info.shape, info.offset, info.nbytes
    if stop is not None:
        if not shape or not 0 <= start <= stop <= shape[0]:
            raise ValueError(f"{info.name}: no rows {start} to {stop} in shape {list(shape)}")
        row_bytes = prod(shape[1:]) * info.dtype.itemsize
        shape, offset, nbytes = (stop - start, *shape[1:]), offset + start * row_bytes, (stop - start) * row_bytes
    tensor = torch.empty(shape, dtype=info.dtype)
    try:
        with opened(info.file) as descriptor:
            count = read_into(descriptor, tensor_bytes(tensor), offset)
    except OSError as error:
        raise InputError(f"{info.file}: cannot be read ({error.strerror}): check the file and its disk") from error
    if count < nbytes:
        raise InputError(f"{info.file}: ends inside tensor {info.name!r}: it was changed while it was being read")
    return tensor


def _read_config(file: Path) -> dict[str, Any]:
    config = read_object(file)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        found = f"is {model_type!r}" if "model_type" in config else "is missing"
        raise InputError(f"{file}: field 'model_type' {found}: name the architecture, for example \"llama\"")
    if not isinstance(config.get("quantization_config"), dict | None):
        raise InputError(f"{file}: field 'quantization_config' is not an object: remove it or write it again")
    return config


def _read_single(folder: Path) -> dict[str, TensorInfo]:
    if (folder / WEIGHTS).exists():
        return read_header(folder / WEIGHTS).tensors
    shards = sorted(file.name for file in folder.glob("*.safetensors"))
    if shards:
        raise InputError(
            f"{folder}: holds {shards[0]} but neither {WEIGHTS} nor {INDEX}: rename a single file to {WEIGHTS}, or add "
            "the index of several"
        )
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        raise _pickle(folder / pickles[0])
    raise InputError(f"{folder}: holds no weights ({WEIGHTS}): copy or download them again")


def _pickle(file: Path) -> InputError:
    return InputError(
        f"{file}: is a pickle, which can run code when it is opened, and is never read here: if you trust it, convert "
        "to safetensors with transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
    )


def _read_index(folder: Path) -> dict[str, TensorInfo]:
    index = folder / INDEX
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise InputError(f"{index}: field 'weight_map' is not a map from tensor to file name: copy the index again")
    headers = {shard: _shard_header(folder, shard) for shard in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        if name not in headers[shard].tensors:
            raise InputError(f"{index}: tensor {name!r} is not in {shard}: copy the index and its shards again")
    for shard, header in headers.items():
        for name in header.tensors:
            if weight_map.get(name) != shard:
                raise InputError(f"{index}: does not place tensor {name!r} in {shard}, which holds it: add it there")
    if WEIGHTS not in headers and (folder / WEIGHTS).exists():
        # transformers would read this file and others the index, so that two tools would see two models.
        raise InputError(f"{folder}: holds {WEIGHTS} and also an index that does not name it: remove one of them")
    return {name: headers[shard].tensors[name] for name, shard in weight_map.items()}


def _shard_header(folder: Path, shard: str) -> Header:
    index, file = folder / INDEX, folder / shard
    if Path(shard).name != shard or "\\" in shard:
        raise InputError(f"{index}: field 'weight_map' names {shard!r}, not a file of this folder: use file names")
    if not file.exists():
        raise InputError(f"{index}: names shard {shard!r}, which is missing: copy or download it again")
    if file.suffix != ".safetensors":
        raise _pickle(file)
    return read_header(file)
