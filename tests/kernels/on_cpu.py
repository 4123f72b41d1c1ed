"""Runs plans of the CUDA C++ kernels on CPU tensors: their own source, compiled by the C++ compiler.

cuda_on_cpu/ has what stands in for the GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from compress.kernels import aot, cuda, nvrtc
from compress.kernels.cpu.build import Unavailable, compiler
from compress.kernels.driver import DTYPES, NUMBERS
from compress.kernels.triton.launch import Plan, Step
from tests.house import ROOT

STAND_INS = Path(__file__).parent / "cuda_on_cpu"
CACHE = ROOT / "build" / "cuda_on_cpu"


def unavailable() -> str | None:
    """Why nothing can be run here, or None."""
    if not sys.platform.startswith("linux"):
        return "coroutines are those of Linux' C library"
    try:
        compiler()
    except Unavailable as reason:
        return str(reason)
    return None


def run(plan: Plan, tensors: Mapping[str, Tensor | None], late: bool = True) -> dict[str, Tensor | None]:
    """Every step of `plan`, on `tensors` (by argument name), which are changed. Buffers begin as garbage.

    late: whether asynchronous copies come when they are waited for, or at once.
    """
    held = dict(tensors)
    for name, (kind, shape) in plan.buffers.items():
        held[name] = torch.full(shape, 77, dtype=cuda.BUFFER_TYPES[kind])
    for step in plan.steps:
        _launch(step, held, late)
    return held


def _launch(step: Step, held: Mapping[str, Tensor | None], late: bool) -> None:
    variant = _variant(step.name)
    values = cuda.arguments(variant.arguments, step, held)
    given: list[ctypes.Array[ctypes.c_char]] = []
    for name, kind in variant.arguments:
        value = values[name]
        if kind in NUMBERS:
            content = NUMBERS[kind](value).tobytes()  # type: ignore[arg-type]
        else:
            assert value is None or isinstance(value, Tensor), name
            assert value is None or (value.dtype == DTYPES[kind] and value.is_contiguous()), name
            content = np.uint64(0 if value is None else value.data_ptr()).tobytes()
        given.append(ctypes.create_string_buffer(content, len(content)))
    pointers = (ctypes.c_void_p * len(given))(*(ctypes.addressof(one) for one in given))
    _library(step.name).launch(pointers, (ctypes.c_int * 3)(*step.grid), ctypes.c_bool(late))


def _variant(name: str) -> aot.Variant:
    return next(variant for variant in aot.variants() if variant.name == name)


@cache
def _library(name: str) -> ctypes.CDLL:
    """The variant called `name` for this machine's CPU, kept below build/."""
    variant = _variant(name)
    texts = nvrtc.sources() | {file.name: file.read_bytes() for file in sorted(STAND_INS.iterdir())}
    macros = [f"-D{name}={value}" for name, value in (variant.constants | {"WARPS": variant.warps}).items()]
    command = [*compiler().command, "-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", *macros]
    digest = hashlib.sha256(json.dumps([command, sorted((n, t.decode()) for n, t in texts.items())]).encode())
    place = CACHE / f"{name}.{digest.hexdigest()[:16]}.so"
    if not place.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as work:
            for file, text in texts.items():
                Path(work, file).write_bytes(text)
            main = f'#include "{variant.module}.cu"\n#define KERNEL {variant.function}\n#include "programs.h"\n'
            Path(work, "main.cpp").write_text(main)
            done = subprocess.run(
                [*command, "main.cpp", "-o", "out.so"], cwd=work, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            Path(work, "out.so").replace(place)
    return ctypes.CDLL(str(place))
