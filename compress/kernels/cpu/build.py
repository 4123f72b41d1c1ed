"""The native library: which compiler, which instructions, and the cache of what was built.

The C++ in source/ is one translation unit (`lmpress.cpp` includes the rest), compiled once per variant by the system
compiler and kept under a name made of everything that went into it: sources, flags, compiler, architecture. A cached
library is used only if its own hash was recorded when it was built: a file that a crash cut short is built again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from compress.errors import USAGE, InputError, did_you_mean
from compress.kernels import trust

SOURCE = Path(__file__).parent / "source"
UNIT = "lmpress.cpp"
CHOICE = "LMPRESS_CPU_VARIANT"
OFF = "none"
MEND = "install g++ or clang++, or name one in CXX"

# Contraction is off because a compiler also fuses the multiplications and additions of intrinsics, each in its own way:
# what is meant to be fused says so, and the rest gives the same bits in every variant and from every compiler.
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-fno-math-errno", "-ffp-contract=off"),
)

# Best first within an architecture.
AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", *AVX2)
VARIANTS: dict[str, tuple[str, ...]] = {
    "amx": ("-mamx-tile", "-mamx-int8", "-mamx-bf16", *AVX512),
    "avx512": AVX512,
    "avx2": AVX2,
    "neon": ("-march=armv8.2-a+dotprod+fp16",),
}
ARCHITECTURES = {"amx": "x86_64", "avx512": "x86_64", "avx2": "x86_64", "neon": "aarch64"}
ALIASES = {"amd64": "x86_64", "arm64": "aarch64"}

# What the processor must report for each variant, in the words of Linux; below, what macOS calls the same.
AVX2_FEATURES = {"avx2", "fma", "f16c", "bmi2"}
AVX512_FEATURES = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", *AVX2_FEATURES}
FEATURES = {
    "amx": {"amx_tile", "amx_int8", "amx_bf16", *AVX512_FEATURES},
    "avx512": AVX512_FEATURES,
    "avx2": AVX2_FEATURES,
    "neon": {"asimddp", "asimdhp"},
}
SYSCTL = {
    **{name: f"hw.optional.{name}" for name in ("avx512f", "avx512bw", "avx512vl", "avx512dq", "f16c", "fma", "bmi2")},
    "avx512_vnni": "hw.optional.avx512vnni",
    "avx2": "hw.optional.avx2_0",
    "asimddp": "hw.optional.arm.FEAT_DotProd",
    "asimdhp": "hw.optional.arm.FEAT_FP16",
}


class Unavailable(Exception):
    """Why there is no native library here, in one line with the mend. Callers go on with torch ops and pass it on."""


class Compiler(NamedTuple):
    """A C++ compiler: the words to call it by, and the first line it prints about its version."""

    command: tuple[str, ...]
    version: str


def supported(root: Path = Path("/")) -> tuple[str, ...]:
    """The variants that this processor can run, best first; empty where there are none. `root`: where /proc lies."""
    features = _mac_features() if sys.platform == "darwin" else _linux_features(root / "proc" / "cpuinfo")
    return tuple(name for name in VARIANTS if ARCHITECTURES[name] == machine() and FEATURES[name] <= features)


def variants() -> tuple[str, ...]:
    """The variants that the compiler can build for this architecture, runnable here or not. Unavailable without one."""
    command = compiler().command
    mine = (name for name in VARIANTS if ARCHITECTURES[name] == machine())
    return tuple(name for name in mine if _accepts(command, VARIANTS[name]))


def choose() -> str:
    """The variant to use: the environment's, else the best that this processor runs and the compiler knows.

    Unavailable where no variant runs here. Without a compiler it is the best that runs: `compile_library` complains.
    InputError where the environment variable LMPRESS_CPU_VARIANT names nothing, or what this processor cannot run.
    """
    choice, runs = os.environ.get(CHOICE, ""), supported()
    if choice == OFF:
        raise Unavailable(f"{CHOICE}={OFF} turns the native kernels off: unset it to use them")
    if not choice and not runs:
        names = [name for name in VARIANTS if ARCHITECTURES[name] == machine()]
        wanted = f"{names[-1]} at least" if names else f"one with {', '.join(VARIANTS)}"
        raise Unavailable(f"no native kernels run on this processor ({platform.machine()}): they need {wanted}")
    if not choice:
        return _known(runs)
    if choice not in VARIANTS:
        hint = did_you_mean(choice, (*VARIANTS, OFF))
        raise InputError(f"{CHOICE}: {choice!r} is not known{hint or '.'} Known: {', '.join((*VARIANTS, OFF))}", USAGE)
    if choice not in runs:
        raise InputError(f"{CHOICE}: this processor cannot run {choice!r}: use {', '.join((*runs, OFF))}", USAGE)
    return choice


def compiler() -> Compiler:
    """$CXX, or the first of c++, g++ and clang++ that works. Unavailable, with the mend, if there is none."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        program = shutil.which(command[0])
        version = _version((program, *command[1:])) if program else None
        if program and version:
            return Compiler((program, *command[1:]), version)
    if chosen:
        raise Unavailable(f"CXX={shlex.join(chosen)!r} is no C++ compiler that works: unset it, or {MEND}")
    raise Unavailable(f"no C++ compiler on the PATH: {MEND}")


def source_sha256(variant: str, source: Path = SOURCE) -> str:
    """The hash of all that the project decides about a library: every source file and the flags, not the compiler."""
    digest = hashlib.sha256()
    for path in sorted(path for path in source.iterdir() if path.suffix in (".cpp", ".h")):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    digest.update("\n".join((*FLAGS, *VARIANTS[variant])).encode())
    return digest.hexdigest()


def compile_library(variant: str, source: Path = SOURCE) -> Path:
    """The shared library of `variant`, from the cache or built now. Unavailable where it cannot be, with the mend.

    Two processes may build at once: each writes a file of its own and renames it, and either result will do.
    """
    found = compiler()
    try:
        library = trust.cache_folder() / f"{_key(variant, source, found)}-{variant}.so"
        if library.is_file() and trust.built_here(sha256_of(library)):
            return library
        with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as folder:
            made = Path(folder) / library.name
            _compile(found.command, VARIANTS[variant], source, made)
            trust.record(sha256_of(made))
            os.replace(made, library)
    except InputError as error:
        raise Unavailable(str(error)) from None
    except OSError as error:
        raise Unavailable(f"the native kernels cannot be built or kept ({error}): make room, {trust.MEND}") from None
    return library


def sha256_of(path: Path) -> str:
    """The hash of a file's content. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _known(runs: tuple[str, ...]) -> str:
    """The first of `runs` that the compiler accepts; an old one does not know what a new processor can do."""
    try:
        command = compiler().command
    except Unavailable:
        return runs[0]
    return next((name for name in runs if _accepts(command, VARIANTS[name])), runs[0])


def _compile(command: tuple[str, ...], flags: tuple[str, ...], source: Path, output: Path) -> None:
    # From within the source folder, so that no path of this machine gets into the library.
    call = [*command, *FLAGS, *flags, UNIT, "-o", str(output), *_static(command)]
    done = subprocess.run(call, cwd=source, capture_output=True, text=True, errors="replace", env=_plain(), check=False)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        told = next((line for line in lines if "error" in line), lines[0] if lines else f"exit code {done.returncode}")
        raise Unavailable(f"{command[0]} cannot build the native kernels ({told}): {MEND} (a newer one)")


def _key(variant: str, source: Path, found: Compiler) -> str:
    parts = (source_sha256(variant, source), *found.command[1:], found.version, sys.platform, machine())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _static(command: tuple[str, ...]) -> list[str]:
    """Link the compiler's own libraries into ours where they exist: what is exported also runs beside older ones.

    Their symbols stay inside: torch brings another libstdc++ into the process.
    """
    if sys.platform == "darwin":
        return []
    flags = [
        flag
        for flag, archive in (("-static-libstdc++", "libstdc++.a"), ("-static-libgcc", "libgcc_eh.a"))
        if os.path.isabs(_answer((*command, f"-print-file-name={archive}")) or "")
    ]
    return [*flags, "-Wl,--exclude-libs,ALL"] if flags else []


@cache
def _accepts(command: tuple[str, ...], flags: tuple[str, ...]) -> bool:
    return _answer((*command, *flags, "-fsyntax-only", "-x", "c++", os.devnull)) is not None


@cache
def _version(command: tuple[str, ...]) -> str | None:
    lines = (_answer((*command, "--version")) or "").splitlines()
    return lines[0].strip() if lines else None


def _answer(command: tuple[str, ...]) -> str | None:
    """What `command` prints; None where it fails or cannot be started."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=_plain(), check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _plain() -> dict[str, str]:
    """This environment with messages in English."""
    return {**os.environ, "LC_ALL": "C"}


def machine() -> str:
    """The processor's family, one name for each whatever the system calls it."""
    name = platform.machine().lower()
    return ALIASES.get(name, name)


def _linux_features(information: Path) -> set[str]:
    """Features that every processor in /proc/cpuinfo reports: "flags" on x86-64, "Features" on aarch64."""
    text = information.read_text(encoding="utf-8", errors="replace") if information.exists() else ""
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", text, flags=re.MULTILINE)
    return set.intersection(*(set(line.split()) for line in lines)) if lines else set()


def _mac_features() -> set[str]:
    return {name for name, key in SYSCTL.items() if _answer(("/usr/sbin/sysctl", "-n", key)) == "1"}
