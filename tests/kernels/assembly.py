"""Compiles variants in processes of their own and reads the code that comes out."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import tempfile
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from compress.kernels import aot

CACHE = Path(__file__).parent.parent.parent / "build" / "triton"


@dataclass(frozen=True)
class Look:
    """One artifact, and what its code consists of.

    arguments: of the entry, each "pointer" or the scalar's size in bits. counts: instruction -> occurrences.
    registers, stack_bytes, spills: per thread; None where the tool that tells is not at hand.
    """

    artifact: aot.Artifact
    arguments: tuple[str, ...]
    counts: dict[str, int]
    registers: int | None
    stack_bytes: int | None
    spills: int | None

    def __str__(self) -> str:
        size = f"{self.registers} registers, {self.stack_bytes} bytes of stack, {self.spills} spills"
        return f"{self.artifact.variant.name} for {self.artifact.target}: {size}, {self.counts}"


INSTRUCTIONS = {
    "gfx": ("v_mfma", "global_load_dwordx4"),
    "sm_": ("mma.sync", "wgmma.mma_async", "tcgen05.mma", "cp.async.cg", "ld.global.v4"),
}


def compilers() -> Executor:
    """Two processes that keep what they compiled below build/, so that a second run of the tests is quick."""
    return ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), _prepare)


def look(name: str, target: str) -> Look:
    """Compile the variant called `name` for `target`, and look."""
    (variant,) = [variant for variant in aot.variants() if variant.name == name]
    made = aot.compilation(variant, target)
    counts = {word: made.assembly.count(word) for word in INSTRUCTIONS[target[:3]]}
    if target.startswith("gfx"):
        kinds = re.findall(r"\.size: +(\d+)\n +\.value_kind: +(\w+)", made.assembly)
        arguments = tuple("pointer" if kind == "global_buffer" else str(8 * int(size)) for size, kind in kinds)
        spilled = [int(found) for found in re.findall(r"\.[sv]gpr_spill_count: +(\d+)", made.assembly)]
        return Look(
            made.artifact,
            arguments,
            counts,
            int(re.findall(r"\.vgpr_count: +(\d+)", made.assembly)[0]),
            int(re.findall(r"\.private_segment_fixed_size: +(\d+)", made.assembly)[0]),
            sum(spilled),
        )
    parameters = re.findall(r"\.param \.[a-z](\d+)( \.ptr)?", made.assembly.partition(".entry")[2].partition(")")[0])
    arguments = tuple("pointer" if pointer else bits for bits, pointer in parameters)
    registers, stack, local = _resources(made.artifact.binary) or (None, None, None)
    return Look(made.artifact, arguments, counts, registers, stack, local)


def _resources(cubin: bytes) -> tuple[int, int, int] | None:
    """Registers, bytes of stack and of local memory per thread, as the cuobjdump inside Triton reads them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.findall(rf"{word}:(\d+)", said)[0]) for word in ("REG", "STACK", "LOCAL"))
    return registers, stack, local


def _prepare() -> None:
    os.environ["TRITON_CACHE_DIR"] = str(CACHE)
