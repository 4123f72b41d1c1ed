"""The C++ library through ctypes: its structures, mirrored field by field, and its functions, with shapes checked."""

from __future__ import annotations

import ctypes
import os
import weakref
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from compress.kernels.cpu import build
from compress.kernels.cpu.threads import available_threads

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
INT8, INT4, SPARSE8, SPARSE4 = 3, 4, 5, 6


class LinearLayout(Structure):
    """`Linear` of weights.h. Pointers are addresses of tensors that the caller keeps alive; 0 for none."""

    _fields_ = [
        ("weight", c_void_p), ("scale", c_void_p), ("zero", c_void_p), ("bias", c_void_p),
        ("outlier_columns", c_void_p), ("outlier_weight", c_void_p), ("counts", c_void_p),
        ("rows", c_int64), ("columns", c_int64), ("padded_columns", c_int64), ("group", c_int64),
        ("scale_group", c_int64), ("outliers", c_int64),
        ("type", c_int32), ("scale_type", c_int32), ("levels", c_float), ("threshold", c_float),
    ]  # fmt: skip


class BlockLayout(Structure):
    """`Block` of block.h."""

    _fields_ = [
        *((name, LinearLayout) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        *((name, c_void_p) for name in ("input_norm", "attention_norm_after", "mlp_norm", "mlp_norm_after")),
        *((name, c_void_p) for name in ("query_norm", "key_norm", "cosine", "sine")),
        ("window", c_int64), ("epsilon", c_float), ("query_scale", c_float), ("softcap", c_float),
        ("activation", c_int32),
    ]  # fmt: skip


class CacheLayout(Structure):
    """`Cache` of attention.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values", "key_steps", "value_steps")),
        *((name, c_int64) for name in ("batch", "capacity", "length")),
        ("type", c_int32), ("padding", c_int32),
    ]  # fmt: skip


class Engine:
    """The library of one variant and a thread pool of its own. Calls from several Python threads take turns."""

    def __init__(self, threads: int | None = None, library: Path | None = None) -> None:
        """threads: by default all. library: a file of `build.choose`'s variant; by default it is built or found.

        Raises build.Unavailable where there is none.
        """
        self.variant = build.choose()
        self.library = _open(library or build.compile_library(self.variant))
        self.threads = threads or available_threads()
        self.pointer = self.library.lmpress_engine_new(self.threads)
        if not self.pointer:
            raise build.Unavailable(f"{self.threads} threads cannot be started: give --threads a smaller number")
        self.lock = Lock()
        # A forked child has no threads to join, so it leaves the pool alone.
        weakref.finalize(self, _free, self.library, self.pointer, os.getpid())

    def multiply(self, linear: LinearLayout, x: Tensor) -> Tensor:
        """float32 x [T, K] times the transposed weight: float32 [T, N]."""
        x = x.contiguous()
        assert x.dtype == torch.float32 and x.shape[1] == linear.columns, (x.dtype, x.shape, linear.columns)
        y = torch.empty(x.shape[0], linear.rows)
        self._call("multiply", byref(linear), x.data_ptr(), len(x), y.data_ptr())
        return y

    def quantize(self, linear: LinearLayout, x: Tensor) -> tuple[Tensor, Tensor]:
        """What `linear` makes of x [T, K]: int8 [T, padded K] and float32 steps [T, groups]."""
        x = x.contiguous()
        integers = torch.empty(len(x), linear.padded_columns, dtype=torch.int8)
        steps = torch.empty(len(x), linear.padded_columns // linear.group)
        self._call("quantize", byref(linear), x.data_ptr(), len(x), integers.data_ptr(), steps.data_ptr())
        return integers, steps

    def embed(self, table: LinearLayout, ids: Tensor) -> Tensor:
        """Rows `ids` (int64 [T], each below table.rows) of a float weight: float32 [T, K]."""
        ids = ids.contiguous()
        x = torch.empty(len(ids), table.columns)
        self._call("embed", byref(table), ids.data_ptr(), len(ids), x.data_ptr())
        return x

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """float32 x [T, D] divided by its root mean square, times `weight` [D]."""
        x, to = x.contiguous(), torch.empty(x.shape)
        self._call("norm", x.data_ptr(), weight.data_ptr(), epsilon, *x.shape, to.data_ptr())
        return to

    def blocks(
        self, blocks: ctypes.Array[BlockLayout], sizes: tuple[int, int, int], cache: CacheLayout, tokens: int, x: Tensor
    ) -> None:
        """Take x [B * tokens, D] through `blocks` (a ctypes array), in place. sizes: heads, key-value heads, d."""
        assert x.dtype == torch.float32 and x.is_contiguous() and len(x) == cache.batch * tokens
        assert cache.length + tokens <= cache.capacity
        numbers = (c_int64 * 3)(*sizes)
        self._call("blocks", blocks, len(blocks), numbers, byref(cache), tokens, x.data_ptr())

    def read(self, buffer: Tensor) -> float:
        """Read `buffer` (float32) once with all threads; its sum."""
        with self.lock:
            return float(self.library.lmpress_read(self.pointer, buffer.data_ptr(), buffer.nbytes))

    def _call(self, name: str, *arguments: object) -> None:
        with self.lock:
            failed = getattr(self.library, f"lmpress_{name}")(self.pointer, *arguments)
        if failed:
            raise MemoryError("the CPU kernels ran out of memory: give a smaller batch or a shorter text")


def _free(library: ctypes.CDLL, pointer: int, process: int) -> None:
    if os.getpid() == process:
        library.lmpress_engine_free(pointer)


@cache
def _open(path: Path) -> ctypes.CDLL:
    """The library at `path` with its functions' types, checked to agree with the structures above."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise build.Unavailable(
            f"{path} cannot be loaded ({error}): set XDG_CACHE_HOME to a folder that allows it"
        ) from None
    for name, layout in (("linear", LinearLayout), ("block", BlockLayout), ("cache", CacheLayout)):
        size = getattr(library, f"lmpress_size_of_{name}")
        size.restype = c_int64
        assert size() == ctypes.sizeof(layout), f"{name}: {size()} bytes in C++, {ctypes.sizeof(layout)} in Python"
    pointer, linear = c_void_p, POINTER(LinearLayout)
    signatures = {
        "engine_new": (pointer, c_int32),
        "engine_free": (None, pointer),
        "multiply": (c_int32, pointer, linear, pointer, c_int64, pointer),
        "quantize": (c_int32, pointer, linear, pointer, c_int64, pointer, pointer),
        "embed": (c_int32, pointer, linear, pointer, c_int64, pointer),
        "norm": (c_int32, pointer, pointer, pointer, c_float, c_int64, c_int64, pointer),
        "blocks": (c_int32, pointer, POINTER(BlockLayout), c_int64, pointer, POINTER(CacheLayout), c_int64, pointer),
        "read": (c_float, pointer, pointer, c_int64),
    }
    for name, (result, *arguments) in signatures.items():
        function = getattr(library, f"lmpress_{name}")
        function.restype, function.argtypes = result, arguments
    return library
