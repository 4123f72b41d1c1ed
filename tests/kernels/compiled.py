"""A stand-in for the compilers: binaries that a test can tell apart, at once and without Triton or NVRTC."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from compress.kernels import aot


class FakeCompiler:
    """Counts what it is asked for. `present`: whether Triton is installed, `nvrtc` whether that is. `flavour`: what
    another compiler changes."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.present = True
        self.nvrtc = True
        self.flavour = "plain"

    def unavailable(self, compiler: aot.Compiler = "triton") -> str | None:
        if compiler == "nvrtc":
            return None if self.nvrtc else "NVRTC is not installed: pip install it"
        return None if self.present else "Triton is not installed: pip install it"

    def compiler_version(self, compiler: aot.Compiler) -> str:
        return f"{compiler} 1.0"

    def compile_variant(self, variant: aot.Variant, target: str) -> aot.Artifact:
        assert self.unavailable(variant.compiler) is None, "asked to compile without a compiler"
        self.asked.append((variant.name, target))
        return aot.Artifact(
            variant=variant,
            target=target,
            symbol=variant.function,
            binary=f"{self.flavour} {variant.name} for {target}".encode(),
            shared_bytes=2048,
            threads=32 * variant.warps,
            arguments=variant.arguments,
        )


def install(monkeypatch: pytest.MonkeyPatch, cache: Path) -> FakeCompiler:
    """Put a fake compiler in the place of both, and the cache and its record below `cache`."""
    compiler = FakeCompiler()
    stand_ins: dict[str, Callable[..., object]] = {
        "unavailable": compiler.unavailable,
        "compiler_version": compiler.compiler_version,
        "compile_variant": compiler.compile_variant,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(aot, name, stand_in)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return compiler
