"""The C++ sources under the compiler's sanitizers: no byte out of place, no undefined step, no race in the pool."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from compress.kernels.cpu import build
from tests.kernels.cpu.self_check import compiled, passes

VARIANTS = build.supported()
MEMORY = "address,undefined"
# The best variant goes through the code of those between it and the simplest; the pool is the same in all.
CASES = [(variant, MEMORY) for variant in dict.fromkeys((*VARIANTS[:1], *VARIANTS[-1:]))]
CASES += [(variant, "thread") for variant in VARIANTS[-1:]]


def sanitizing_compiler(sanitizer: str, folder: Path) -> tuple[str, ...]:
    """The compiler's command; skips where there is none, or none of its sanitizers."""
    try:
        command = build.compiler().command
    except build.Unavailable as reason:
        pytest.skip(str(reason))
    source = folder / "empty.cpp"
    source.write_text("int main() { return 0; }\n", encoding="utf-8")
    call = [*command, f"-fsanitize={sanitizer}", str(source), "-o", str(folder / "empty")]
    if subprocess.run(call, capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{command[0]} has no -fsanitize={sanitizer} here")
    return command


def fixed_addresses() -> list[str]:
    """A prefix that turns address randomization off where that is allowed: ThreadSanitizer wants known places."""
    prefix = ["setarch", "-R"]
    if shutil.which("setarch") is None or subprocess.run([*prefix, "true"], check=False).returncode != 0:
        return []
    return prefix


@pytest.mark.skipif(not VARIANTS, reason="this processor runs none of the variants")
@pytest.mark.parametrize(("variant", "sanitizer"), CASES, ids=["-".join(case) for case in CASES])
def test_clean(variant: str, sanitizer: str, tmp_path: Path) -> None:
    command = sanitizing_compiler(sanitizer, tmp_path)
    # Unoptimized: builds in half the time, and nothing is optimized away before it is checked.
    flags = [*build.VARIANTS[variant], f"-fsanitize={sanitizer}", "-fno-sanitize-recover=undefined", "-g", "-O0"]
    program = compiled(command, flags, tmp_path)
    passes([*(fixed_addresses() if sanitizer == "thread" else []), program], threads=3, rounds=500)
