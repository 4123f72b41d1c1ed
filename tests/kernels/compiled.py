"""A stand-in for the Triton compiler: binaries that a test can tell apart, at once and without Triton."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from compress.kernels import aot


class FakeCompiler:
    """Counts what it is asked for. `present`: whether Triton is installed. `flavour`: what another compiler changes."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.present = True
        self.flavour = "plain"

    def unavailable(self) -> str | None:
        return None if self.present else "Triton is not installed: pip install it"

    def compile_variant(self, variant: aot.Variant, target: str) -> aot.Artifact:
        assert self.present, "asked to compile without a compiler"
        self.asked.append((variant.name, target))
        return aot.Artifact(
            variant=variant,
            target=target,
            symbol=variant.function,
            binary=f"{self.flavour} {variant.name} for {target}".encode(),
            shared_bytes=2048,
            threads=32 * variant.warps,
            arguments=(*variant.signature.items(), *aot.SCRATCH),
        )


def install(monkeypatch: pytest.MonkeyPatch, cache: Path) -> FakeCompiler:
    """Put a fake compiler in Triton's place, and the cache and its record below `cache`."""
    compiler = FakeCompiler()
    stand_ins: dict[str, Callable[..., object]] = {
        "unavailable": compiler.unavailable,
        "compile_variant": compiler.compile_variant,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(aot, name, stand_in)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return compiler
