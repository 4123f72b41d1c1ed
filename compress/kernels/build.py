"""Kernels for the targets that a recipe or a command names: what serves what, and its binaries, compiled or found.

`host` is the C++ library of compress/kernels/cpu, one file per instruction set that the compiler knows; the GPU targets
are compiled ahead of time from Triton and CUDA C++ sources, without a GPU. What was built is kept in the cache folder
and noted in the record of `compress.kernels.trust`, so that a build is done once and this machine knows its own.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from compress.errors import USAGE, InputError
from compress.formats import pack_quantized, sparse24
from compress.formats.scheme import Scheme
from compress.kernels import aot, trust
from compress.kernels.cpu import build as cpu
from compress.kernels.cpu.kernel import refuses as library_refuses
from compress.kernels.exported import (
    FOLDER,
    HOST,
    MANIFEST,
    Built,
    Entry,
    has_kernels,
    parse_entry,
    read_binary,
    read_manifest,
    replace_file,
)
from compress.kernels.sparse import launch as sparse
from compress.kernels.triton import launch

TARGETS = (HOST, *aot.TARGETS)
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
SMALLEST = (16, 16)

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Wanted:
    """What kernels are to serve: scheme and shape [N, K] of each compressed layer, dtype of scales and activations."""

    layers: Mapping[str, tuple[Scheme, tuple[int, int]]]
    dtype: torch.dtype


def unavailable(target: str) -> str | None:
    """Why kernels for `target` cannot be built on this machine, with the mend; None where they can."""
    if target != HOST:
        return aot.unavailable()
    try:
        return None if cpu.variants() else f"no kernels are written for processors of this family ({_platform()})"
    except cpu.Unavailable as reason:
        return str(reason)


def refuses(scheme: Scheme, dtype: torch.dtype, target: str, shape: tuple[int, int] = SMALLEST) -> str | None:
    """Why no kernel of `target` multiplies weights [N, K] of `scheme` whose scales are `dtype`; None where one does."""
    if target == HOST:
        return library_refuses(scheme)
    if dtype not in DTYPE_NAMES:
        return f"scales are {dtype}, and its kernels read {' or '.join(map(str, DTYPE_NAMES))} (export.scale_dtype)"
    if scheme.format == sparse24.NAME:
        reason = _sparse_refuses(scheme, target) or sparse.refuses(
            launch.Shape(1, *shape), kept_values(scheme), DTYPE_NAMES[dtype]
        )
    else:
        packed = packing(scheme) if scheme.format == pack_quantized.NAME else None
        reason = launch.product_refuses(launch.Shape(1, *shape), DTYPE_NAMES[dtype], packed)
    if reason is not None:
        return reason
    served = any(serves(variant, scheme, dtype) for variant in aot.variants())
    return None if served else f"no kernel multiplies {scheme.name}"


def serves(variant: aot.Variant, scheme: Scheme, dtype: torch.dtype) -> bool:
    """Whether `variant` has a part in multiplying weights of `scheme` with scales and activations of `dtype`."""
    if variant.format != scheme.format or not takes(variant, dtype):
        return False
    if scheme.format == pack_quantized.NAME:
        wanted = packing(scheme)
        constants = {"BITS": wanted.bits, "SLOTS": wanted.block // wanted.span}
    elif scheme.format == sparse24.NAME:
        constants = {"BITS": scheme.grid.bits, "SPAN": kept_values(scheme).span}
    else:
        return True
    return all(variant.constants.get(name, value) == value for name, value in constants.items())


def takes(variant: aot.Variant, dtype: torch.dtype) -> bool:
    """Whether `variant` is the one for activations of `dtype`."""
    return f"*{DTYPE_NAMES.get(dtype)}" in variant.signature.values()


def packing(scheme: Scheme) -> launch.Packing:
    """What a launch plan must know of pack-quantized weights of `scheme`."""
    group = scheme.grid.group_size
    # The kernels find a group by a shift: one of 96 columns is three of 32 (layout.split_groups).
    return launch.Packing(scheme.grid.bits, None if group is None else group & -group, not scheme.grid.symmetric)


def kept_values(scheme: Scheme) -> sparse.Kept:
    """What a launch plan must know of 2:4 weights of `scheme`; groups as in `packing`."""
    group = scheme.grid.group_size
    return sparse.Kept(scheme.grid.bits, None if group is None else group & -group)


def problem(wanted: Wanted, target: str) -> str | None:
    """Why `target` cannot be had: a layer that it does not serve, or what is missing here."""
    for layer, (scheme, shape) in wanted.layers.items():
        reason = refuses(scheme, wanted.dtype, target, shape)
        if reason is not None:
            return f"{reason} ({layer}): leave {target} out, or change the scheme"
    reason = unavailable(target)
    if reason is None and target != HOST and any(variant.compiler == "nvrtc" for variant in chosen(wanted)):
        reason = aot.unavailable("nvrtc")
    return None if reason is None else f"cannot be built here: {reason}"


def check(wanted: Wanted, targets: Collection[str], where: str) -> None:
    """Raise InputError unless each of `targets` serves every layer and can be built here. where: what named them."""
    for target in targets:
        reason = problem(wanted, target)
        if reason is not None:
            raise InputError(f"{where}: {target}: {reason}", USAGE)


def build(wanted: Wanted, targets: Collection[str], progress: Progress | None = None) -> list[Built]:
    """The binaries for `targets` that serve `wanted`, and attention over the cache; each from the cache or built now.

    progress: told the file in work, how many are done, and how many there are. Raises InputError where one cannot be
    built.
    """
    jobs: list[tuple[str, Callable[[], Built]]] = []
    if HOST in targets:
        jobs += [(name, partial(host_library, name)) for name in cpu.variants()]
    for target in targets:
        if target != HOST:
            jobs += [(f"{one.name}.{target}", partial(device_kernel, one, target)) for one in chosen(wanted)]
    built: list[Built] = []
    for name, job in jobs:
        if progress is not None:
            progress(name, len(built), len(jobs))
        built.append(job())
    return built


def chosen(wanted: Wanted) -> list[aot.Variant]:
    """The variants that have a part in running a checkpoint that holds `wanted`."""
    schemes = {scheme for scheme, _ in wanted.layers.values()}
    return [
        variant
        for variant in aot.variants()
        if any(serves(variant, scheme, wanted.dtype) for scheme in schemes)
        or (variant.format == aot.ATTENTION and takes(variant, wanted.dtype))
    ]


def runnable(variant: aot.Variant, target: str, folder: Path | None, trusted: bool) -> Built:
    """The binary of `variant` that may run here: the one in the checkpoint `folder`, or one of our own.

    The checkpoint's is taken where this machine has built the very same, or `trusted` says to; otherwise our own from
    the cache, or built now. Raises InputError for a binary that was changed, and where there is none that may run.
    """
    entry = _exported(variant.name, target, folder)
    fits = False
    if folder is not None and entry is not None:
        binary = read_binary(folder, entry)
        fits = (entry.source_sha256, entry.arguments) == (aot.source_sha256(variant), variant.arguments)
        if fits and (trusted or trust.built_here(entry.sha256)):
            return Built(entry, binary)
    try:
        return device_kernel(variant, target)
    except InputError as error:
        if entry is None or folder is None:
            raise
        why = "was not built on this machine" if fits else "was built from another version's source"
        mend = "give --trust-kernels to run it all the same" if fits else f"`lmpress kernels build {folder}`"
        raise InputError(f"{folder / FOLDER / entry.file}: {why} and is not run ({error}): {mend}") from None


def trusted_library(folder: Path, name: str) -> Path:
    """The checkpoint's own C++ library for the instruction set `name`: for `--trust-kernels` without a compiler.

    It is copied to where only this user can write, so that what was checked is what is loaded. Raises InputError where
    there is none for this system, it was changed, or it was built from another version's source.
    """
    entry = _exported(name, HOST, folder)
    if entry is None or entry.platform != _platform():
        raise InputError(f"{folder}: holds no {name} library for {_platform()}: install a C++ compiler")
    binary = read_binary(folder, entry)
    if entry.source_sha256 != source_of(entry):
        file = folder / FOLDER / entry.file
        raise InputError(f"{file}: was built from another version's source and is not run: install a C++ compiler")
    place = trust.cache_folder() / f"trusted-{entry.sha256}{Path(entry.file).suffix}"
    _keep(place, binary)
    return place


def source_of(entry: Entry) -> str | None:
    """The sha256 of the installed package's source of `entry`; None where it has no such kernel."""
    if entry.target == HOST:
        return cpu.source_sha256(entry.name) if entry.name in cpu.VARIANTS else None
    found = next((variant for variant in aot.variants() if variant.name == entry.name), None)
    return aot.source_sha256(found) if found is not None and entry.target in aot.TARGETS else None


def host_library(name: str) -> Built:
    """The C++ library for the instruction set `name`, for this system and family of processors."""
    try:
        library, compiler = cpu.compile_library(name), cpu.compiler().version
    except cpu.Unavailable as reason:
        raise InputError(f"kernels: the {name} library cannot be built here: {reason}") from None
    fields: dict[str, Any] = {"format": None, "symbol": None, "threads": 0, "shared_bytes": 0}
    fields |= {"arguments": [], "constants": {}, "name": name, "target": HOST, "platform": _platform()}
    return _built(
        library.read_bytes(),
        {
            **fields,
            "file": f"{name}.{_platform()}{library.suffix}",
            "source_sha256": cpu.source_sha256(name),
            "builder": {"lmpress": version("lmpress"), "compiler": compiler},
        },
    )


def device_kernel(variant: aot.Variant, target: str) -> Built:
    """The binary of `variant` for a GPU `target`, from the cache or built now. Raises InputError where it cannot be."""
    source = aot.source_sha256(variant)
    place = trust.cache_folder() / f"{variant.name}.{target}.{_key(source, target)}"
    known = _kept(place)
    if known is not None:
        return known
    reason = aot.unavailable(variant.compiler)
    if reason is not None:
        raise InputError(f"kernels: {variant.name} for {target} cannot be built here: {reason}")
    made = aot.compile_variant(variant, target)
    built = _built(
        made.binary,
        {
            "file": f"{variant.name}.{target}.{'hsaco' if target.startswith('gfx') else 'cubin'}",
            "name": variant.name,
            "target": target,
            "platform": None,
            "format": variant.format,
            "symbol": made.symbol,
            "threads": made.threads,
            "shared_bytes": made.shared_bytes,
            "arguments": made.arguments,
            "constants": variant.constants,
            "source_sha256": source,
            "builder": {"lmpress": version("lmpress"), variant.compiler: aot.compiler_version(variant.compiler)},
        },
    )
    trust.record(built.entry.sha256)
    _keep(place.with_name(f"{place.name}.bin"), built.binary)
    _keep(place.with_name(f"{place.name}.json"), json.dumps(asdict(built.entry)).encode())
    return built


@cache
def _manifest(folder: Path, changed: int) -> tuple[Entry, ...]:
    """`changed`: when the manifest was last written, so that one written anew is read anew."""
    return read_manifest(folder)


def _exported(name: str, target: str, folder: Path | None) -> Entry | None:
    """The manifest's entry of the kernel `name` for `target`, if the checkpoint in `folder` came with one."""
    if folder is None or not has_kernels(folder):
        return None
    file = folder / FOLDER / MANIFEST
    entries = _manifest(folder, file.stat().st_mtime_ns if file.exists() else 0)
    return next((entry for entry in entries if (entry.name, entry.target) == (name, target)), None)


def _built(binary: bytes, fields: Mapping[str, Any]) -> Built:
    """Checked as a reader will check it, so that nothing is written that cannot be read."""
    told = {**fields, "nbytes": len(binary), "sha256": hashlib.sha256(binary).hexdigest()}
    return Built(parse_entry(told, f"kernel '{fields['name']}"), binary)


def _key(source: str, target: str) -> str:
    """Of all that decides a binary but the compiler: where that is missing, what it built earlier still serves."""
    return hashlib.sha256("\n".join((source, target, version("lmpress"))).encode()).hexdigest()[:32]


def _keep(file: Path, content: bytes) -> None:
    try:
        replace_file(file, content)
    except OSError as error:
        raise InputError(f"{file}: cannot be written ({error.strerror}): free some space, {trust.MEND}") from error


def _kept(place: Path) -> Built | None:
    """What an earlier build left in the cache, if it is whole and recorded."""
    entry_file, binary_file = (place.with_name(f"{place.name}.{suffix}") for suffix in ("json", "bin"))
    if not (entry_file.is_file() and binary_file.is_file()):
        return None
    try:
        entry = parse_entry(json.loads(entry_file.read_bytes()), f"{entry_file}: '")
    except (ValueError, InputError):
        return None
    binary = binary_file.read_bytes()
    whole = hashlib.sha256(binary).hexdigest() == entry.sha256 and trust.built_here(entry.sha256)
    return Built(entry, binary) if whole else None


def _sparse_refuses(scheme: Scheme, target: str) -> str | None:
    """Why no sparse tensor core of `target` takes weights of `scheme`, or None."""
    if not target.startswith("sm_"):
        return f"2:4 weights need NVIDIA's sparse tensor cores, and {scheme.name} has no kernel for another GPU"
    if (scheme.grid.bits == 8) != (scheme.activation_bits == 8):
        return f"{scheme.name} has no 2:4 kernel: int8 values are multiplied with int8 activations (W8A8), others not"
    return None


def _platform() -> str:
    return f"{sys.platform}-{cpu.machine()}"
