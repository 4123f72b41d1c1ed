"""NVIDIA's driver through cuda-core, without Triton: loads cubins and launches them on the stream that torch uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.kernels.aot import SCRATCH
from compress.kernels.exported import Built, Entry

MEND = "pip install 'lmpress[gpu]'"
# What a block gets without asking; more must be asked for, kernel by kernel.
FREE_SHARED_BYTES = 48 << 10
ALIGNMENT = 16

DTYPES = {
    "*fp32": torch.float32,
    "*fp16": torch.float16,
    "*bf16": torch.bfloat16,
    "*i8": torch.int8,
    "*u8": torch.uint8,
    "*i32": torch.int32,
    "*i64": torch.int64,
}
NUMBERS: dict[str, type[np.generic]] = {"i32": np.int32, "i64": np.int64, "fp32": np.float32}

NOTHING: dict[str, None] = dict.fromkeys(name for name, _ in SCRATCH)

Grid = tuple[int, int, int]
Value = Tensor | int | float | None


@dataclass(frozen=True)
class Loaded:
    """A kernel on its device, ready to be launched."""

    entry: Entry
    kernel: Any
    device: torch.device


def unavailable() -> str | None:
    """Why cubins cannot be launched from this environment, with the mend; None where they can."""
    for module, package in (("cuda.core", "cuda-core"), ("cuda.bindings", "cuda-bindings")):
        if not _importable(module):
            return f"{package} is not installed: {MEND}"
    return None


def marshal(entry: Entry, values: Mapping[str, Value]) -> tuple[Any, ...]:
    """`values` by argument name, as cuda-core takes them: addresses as int, numbers as NumPy scalars of their width.

    None stands for a null pointer; Triton's own scratch pointers, which need not be given, are null. Raises ValueError
    for a value that is missing, unknown, of another dtype, not contiguous, not aligned as the compiler assumed, or too
    large for its type.
    """
    given = {**NOTHING, **values}
    names = [name for name, _ in entry.arguments]
    if given.keys() != {*names, *NOTHING}:
        raise ValueError(f"{entry.name} takes {', '.join(names)}, not {', '.join(values)}")
    return tuple(_argument(entry, name, kind, given[name]) for name, kind in entry.arguments)


def load(built: Built, device: torch.device) -> Loaded:
    """`built` on `device`, with the shared memory it wants. Its bytes will run: `build.runnable` says which may."""
    from cuda.bindings import driver
    from cuda.core import ObjectCode

    entry = built.entry
    if entry.symbol is None:
        raise ValueError(f"{entry.file} is a library, not a kernel")
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()  # the device's context exists from here on
        kernel = ObjectCode.from_cubin(built.binary, name=entry.file).get_kernel(entry.symbol)
        if entry.shared_bytes > FREE_SHARED_BYTES:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            index = torch.cuda.current_device()
            handle = driver.CUkernel(int(kernel.handle))
            (status,) = driver.cuKernelSetAttribute(attribute, entry.shared_bytes, handle, index)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"{entry.file}: {entry.shared_bytes} bytes of shared memory: {status.name}")
    return Loaded(entry, kernel, device)


def launch(loaded: Loaded, grid: Grid, values: Mapping[str, Value]) -> None:
    """Queue the kernel on torch's current stream of its device. `values`: as for `marshal`."""
    from cuda.core import launch as queue

    arguments = marshal(loaded.entry, values)
    for name, value in values.items():
        if isinstance(value, Tensor) and value.device != loaded.device:
            raise ValueError(f"{loaded.entry.name}: {name} is on {value.device}, not {loaded.device}")
    handle = torch.cuda.current_stream(loaded.device).cuda_stream
    entry = loaded.entry
    with torch.cuda.device(loaded.device):
        queue(
            _stream(handle, loaded.device),
            _configuration(grid, entry.threads, entry.shared_bytes),
            loaded.kernel,
            *arguments,
        )


def _argument(entry: Entry, name: str, kind: str, value: Value) -> Any:
    place = f"{entry.name}: {name}"
    if kind in NUMBERS:
        if isinstance(value, Tensor) or value is None:
            raise ValueError(f"{place} is a number, not {type(value).__name__}")
        try:
            number = NUMBERS[kind](value)
        except OverflowError as error:
            raise ValueError(f"{place} is {value}, which {kind} cannot hold") from error
        if kind != "fp32" and int(number) != value:
            raise ValueError(f"{place} is {value}, which is no whole number")
        return number
    if value is None:
        return 0
    if not isinstance(value, Tensor):
        raise ValueError(f"{place} is a tensor, not {type(value).__name__}")
    if value.dtype != DTYPES[kind]:
        raise ValueError(f"{place} is {DTYPES[kind]}, not {value.dtype}")
    if not value.is_contiguous():
        raise ValueError(f"{place} is not contiguous: its strides are {value.stride()}")
    address = value.data_ptr()
    if address % ALIGNMENT:
        raise ValueError(f"{place} does not begin at a multiple of {ALIGNMENT} bytes")
    return address


@lru_cache(maxsize=4096)
def _configuration(grid: Grid, threads: int, shared_bytes: int) -> Any:
    from cuda.core import LaunchConfig

    return LaunchConfig(grid=grid, block=threads, shmem_size=shared_bytes)


@cache
def _stream(handle: int, device: torch.device) -> Any:
    """The stream behind torch's handle; 0 is the default stream, which cuda-core has under a name."""
    from cuda.core import LEGACY_DEFAULT_STREAM, Stream

    return Stream.from_handle(handle) if handle else LEGACY_DEFAULT_STREAM


@cache
def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
