"""CUDA C++ to cubins with NVIDIA's run-time compiler: no GPU, no driver, and no CUDA toolkit are needed.

The sources of compress/kernels/sparse include nothing but each other, and are handed over as text, so that a binary
does not depend on where the package lies. A driver surely loads what an NVRTC of its own major version, or of an older
one, has made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from compress.errors import InputError

SOURCES = Path(__file__).parent / "sparse" / "source"
MEND = "pip install 'lmpress[kernels]'"


class Output(NamedTuple):
    """What came out. log: ptxas's account of registers, stack, spills and shared memory."""

    cubin: bytes
    ptx: str
    log: str


@cache
def unavailable() -> str | None:
    """Why NVRTC cannot compile here, in one line, or None."""
    for module, package in (("cuda.bindings", "cuda-bindings"), ("cuda.pathfinder", "cuda-pathfinder")):
        if not _importable(module):
            return f"{package} is not installed: {MEND}"
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        load_nvidia_dynamic_lib("nvrtc")
    except DynamicLibNotFoundError:
        return f"NVRTC is not installed: {MEND}"
    return None


def version() -> str:
    """NVRTC's own version, such as 13.1. It can be had where `unavailable` says None."""
    from cuda.bindings import nvrtc

    major, minor = _checked(nvrtc.nvrtcVersion())
    return f"{major}.{minor}"


def compile_source(file: str, macros: Mapping[str, int], target: str) -> Output:
    """`file` of the sources compiled for `target` (sm_90, ...) with `macros` defined.

    Raises InputError with the compiler's first complaint where it refuses.
    """
    from cuda.bindings import nvrtc

    texts = sources()
    headers = {name: text for name, text in texts.items() if name.endswith(".h")}
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            texts[file], file.encode(), len(headers), list(headers.values()), [name.encode() for name in headers]
        )
    )
    options = [f"--gpu-architecture={target}", "--std=c++17", "--ptxas-options=-v"]
    options += [f"--define-macro={name}={value}" for name, value in macros.items()]
    encoded = [option.encode() for option in options]
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode().rstrip("\0\n")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise InputError(f"kernels: {file} for {target}: {log.splitlines()[0] if log else status.name}")
        cubin = _text(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        ptx = _text(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).decode().rstrip("\0")
        return Output(cubin, ptx, log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def sources() -> dict[str, bytes]:
    """File name -> content of all that may go into a binary."""
    return {file.name: file.read_bytes() for file in sorted(SOURCES.iterdir()) if file.suffix in (".cu", ".h")}


def sources_sha256() -> str:
    """Of all sources together: each may include any."""
    digest = hashlib.sha256()
    for name, text in sources().items():
        digest.update(f"{name}\n{len(text)}\n".encode() + text)
    return digest.hexdigest()


def _text(program: Any, size_of: Any, read: Any) -> bytes:
    buffer = bytes(_checked(size_of(program)))
    _checked(read(program, buffer))
    return buffer


def _checked(answer: tuple[Any, ...]) -> Any:
    """What a call gave besides its status. Raises RuntimeError for a status that is not success."""
    status, *values = answer
    if status.name != "NVRTC_SUCCESS":
        raise RuntimeError(f"NVRTC: {status.name}")
    return values[0] if len(values) == 1 else values


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
