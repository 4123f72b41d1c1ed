"""The native library: found, built, cached, chosen, and told in one line where it cannot be had."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compress.errors import USAGE, InputError
from compress.kernels import trust
from compress.kernels.cpu import build
from tests.command import lmpress

HELPER = "#pragma once\nstatic int answer() { return 42; }\n"
UNIT = '#include "helper.h"\nextern "C" __attribute__((visibility("default"))) int told() { return answer(); }\n'
VARIANT = (build.supported() or tuple(build.VARIANTS))[0]
BUILD = "from pathlib import Path; from compress.kernels.cpu.build import compile_library; "


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and an environment that chooses nothing."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv(build.CHOICE, raising=False)
    return folder / "lmpress" / "kernels"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A library of one function."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "helper.h").write_text(HELPER, encoding="utf-8")
    (folder / build.UNIT).write_text(UNIT, encoding="utf-8")
    return folder


def program(path: Path, script: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def old_compiler(folder: Path) -> Path:
    """A compiler from before AVX-512 VNNI."""
    return program(folder / "old", 'for word in "$@"; do test "$word" != -mavx512vnni || exit 1; done; echo old 1')


def cpuinfo(root: Path, word: str, *processors: set[str]) -> Path:
    """A /proc/cpuinfo under `root` with one line of features per processor."""
    (root / "proc").mkdir(parents=True, exist_ok=True)
    lines = [f"processor\t: {i}\n{word}\t\t: {' '.join(sorted(some))}\n" for i, some in enumerate(processors)]
    (root / "proc" / "cpuinfo").write_text("\n".join(lines), encoding="utf-8")
    return root


def told(library: Path) -> int:
    answer: int = ctypes.CDLL(str(library)).told()
    return answer


def test_builds_once_and_finds_it_again(source: Path, cache: Path) -> None:
    library = build.compile_library(VARIANT, source)
    assert told(library) == 42 and library.parent == cache and library.name.endswith(f"-{VARIANT}.so")
    made = library.stat().st_mtime_ns
    assert build.compile_library(VARIANT, source) == library and library.stat().st_mtime_ns == made
    assert sorted(path.name for path in cache.iterdir()) == sorted(["built", library.name])


def test_what_is_built_is_recorded(source: Path) -> None:
    assert trust.built_here(build.sha256_of(build.compile_library(VARIANT, source)))


@pytest.mark.parametrize("change", ["unit", "header", "new header", "flags", "compiler", "arguments"])
def test_everything_that_goes_in_changes_the_name(change: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = build.Compiler(("c++",), "1")
    before, hashed = build._key(VARIANT, source, found), build.source_sha256(VARIANT, source)
    if change == "unit":
        (source / build.UNIT).write_text(UNIT + "\n", encoding="utf-8")
    elif change == "header":
        (source / "helper.h").write_text(HELPER.replace("42", "43"), encoding="utf-8")
    elif change == "new header":
        (source / "more.h").write_text("", encoding="utf-8")
    elif change == "flags":
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    elif change == "compiler":
        found = build.Compiler(("c++",), "2")
    else:
        found = build.Compiler(("c++", "-stdlib=libc++"), "1")
    assert build._key(VARIANT, source, found) != before
    # A manifest notes the source hash, and another machine has another compiler.
    assert (build.source_sha256(VARIANT, source) != hashed) == (change not in ("compiler", "arguments"))


def test_a_name_or_an_end_of_file_cannot_move_between_sources(source: Path) -> None:
    before = build.source_sha256(VARIANT, source)
    (source / "helper.h").write_text(HELPER + UNIT, encoding="utf-8")
    (source / build.UNIT).write_text("", encoding="utf-8")
    assert build.source_sha256(VARIANT, source) != before


def test_a_changed_source_is_built_again(source: Path) -> None:
    first = build.compile_library(VARIANT, source)
    (source / "helper.h").write_text(HELPER.replace("42", "43"), encoding="utf-8")
    second = build.compile_library(VARIANT, source)
    assert (told(first), told(second)) == (42, 43) and first.exists()


def test_a_damaged_library_is_built_again(source: Path) -> None:
    library = build.compile_library(VARIANT, source)
    whole = library.read_bytes()
    library.unlink()
    library.write_bytes(whole[: len(whole) // 2])
    assert build.compile_library(VARIANT, source) == library and library.read_bytes() == whole


def test_no_path_of_this_machine_is_in_the_library(source: Path, tmp_path: Path) -> None:
    (source / "helper.h").write_text(
        HELPER.replace("42", "(int)sizeof(__FILE__) + __FILE__[0]") + "// ", encoding="utf-8"
    )
    assert str(tmp_path).encode() not in build.compile_library(VARIANT, source).read_bytes()


def test_only_what_is_marked_is_exported(source: Path) -> None:
    code = "#include <string>\n#include <thread>\nstd::string name(int n) { return std::string(n, 'a'); }\n"
    (source / "helper.h").write_text(code + HELPER.replace("42", "(int)name(40).size() + 2"), encoding="utf-8")
    library = build.compile_library(VARIANT, source)
    assert told(library) == 42
    names = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    assert [line.split()[-1] for line in names.stdout.splitlines()] == ["told"]


def test_two_processes_build_at_once(source: Path, cache: Path) -> None:
    """Each says when it is ready and waits for the other, so that neither finds the other's library."""
    code = f"{BUILD}print('ready', flush=True); input(); print(compile_library({VARIANT!r}, Path({str(source)!r})))"
    command = [sys.executable, "-c", code]
    both = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.stdout.readline() for process in both if process.stdout] == ["ready\n"] * 2
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    ends = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    paths = {Path(out.strip()) for out, _ in ends}
    library = paths.pop()
    assert not paths and told(library) == 42 and trust.built_here(build.sha256_of(library))
    assert sorted(path.name for path in cache.iterdir()) == sorted(["built", library.name])


def test_a_compile_error_is_one_line_with_the_first_error(source: Path, cache: Path) -> None:
    (source / build.UNIT).write_text("int a = b;\nint c = d;\n", encoding="utf-8")
    with pytest.raises(
        build.Unavailable, match=r"cannot build the native kernels \(lmpress.cpp:1:9: .*b.*\)"
    ) as caught:
        build.compile_library(VARIANT, source)
    assert "\n" not in str(caught.value)
    assert list(cache.iterdir()) == []


def test_a_cache_that_others_can_write_to_is_refused(source: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o770)
    with pytest.raises(build.Unavailable, match=rf"{cache}: others can write to it \(mode 770\): chmod 700 it"):
        build.compile_library(VARIANT, source)


def test_without_a_compiler(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    for asked in (build.compiler, build.variants, lambda: build.compile_library(VARIANT, source)):
        with pytest.raises(build.Unavailable, match=r"no C\+\+ compiler on the PATH: install g\+\+ or clang\+\+"):
            asked()
    assert build.supported() == build.supported(Path("/"))


def test_the_first_compiler_that_works_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    program(tmp_path / "c++", "exit 1")
    clang = program(tmp_path / "clang++", "echo clang 14; echo more")
    assert build.compiler() == ((str(clang),), "clang 14")
    gcc = program(tmp_path / "g++", "echo gcc 12")
    assert build.compiler() == ((str(gcc),), "gcc 12")
    mine = program(tmp_path / "own" / "mine", 'echo "mine $1"')
    monkeypatch.setenv("CXX", f"{mine} --fast")
    assert build.compiler() == ((str(mine), "--fast"), "mine --fast")


@pytest.mark.parametrize("value", ["no-such-compiler", "false"], ids=["missing", "broken"])
def test_a_compiler_that_was_named_and_does_not_work_is_not_replaced(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", value)
    with pytest.raises(build.Unavailable, match=f"CXX='?{value}'? is no .* compiler that works: unset it"):
        build.compiler()


def test_every_variant_of_this_architecture_can_be_built() -> None:
    machine = build.machine()
    assert build.variants() == tuple(name for name in build.VARIANTS if build.ARCHITECTURES[name] == machine)


def test_variants_are_those_the_compiler_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("CXX", str(old_compiler(tmp_path)))
    assert build.variants() == ("avx2",)


@pytest.mark.parametrize(
    ("machine", "word", "processors", "runs"),
    [
        ("x86_64", "flags", [build.FEATURES["amx"]], ("amx", "avx512", "avx2")),
        ("x86_64", "flags", [build.FEATURES["avx512"] | {"sse2"}] * 2, ("avx512", "avx2")),
        ("AMD64", "flags", [build.FEATURES["avx512"]], ("avx512", "avx2")),
        ("x86_64", "flags", [build.FEATURES["avx512"] - {"avx512_vnni"}], ("avx2",)),
        ("x86_64", "flags", [build.FEATURES["avx512"], build.FEATURES["avx2"]], ("avx2",)),
        ("x86_64", "flags", [{"sse2", "avx"}], ()),
        ("aarch64", "Features", [{"asimd", "asimdhp", "asimddp"}], ("neon",)),
        ("aarch64", "Features", [{"asimd"}], ()),
        ("riscv64", "isa", [set[str]()], ()),
    ],
    ids=["amx", "avx512", "windows' name", "no vnni", "unlike cores", "old", "neon", "old arm", "other"],
)
def test_what_the_processor_runs(
    machine: str,
    word: str,
    processors: list[set[str]],
    runs: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    monkeypatch.setattr(build.sys, "platform", "linux")
    assert build.supported(cpuinfo(tmp_path, word, *processors)) == runs
    assert build.supported(tmp_path / "without /proc") == ()


def test_macos_is_asked_by_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(build.sys, "platform", "darwin")
    asked: list[str] = []
    monkeypatch.setattr(build, "_answer", lambda command: asked.append(command[-1]) or "1")
    assert build.supported() == ("neon",)
    assert set().union(*build.FEATURES.values()) - set(build.SYSCTL) == {"amx_tile", "amx_int8", "amx_bf16"}
    assert "hw.optional.arm.FEAT_DotProd" in asked
    monkeypatch.setattr(build, "_answer", lambda command: "0" if command[-1].endswith("DotProd") else "1")
    assert build.supported() == ()


def test_choosing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "supported", lambda: ("avx512", "avx2"))
    monkeypatch.setattr(build, "_accepts", lambda command, flags: True)
    assert build.choose() == "avx512"
    monkeypatch.setenv(build.CHOICE, "avx2")
    assert build.choose() == "avx2"
    monkeypatch.setenv(build.CHOICE, "none")
    with pytest.raises(build.Unavailable, match="LMPRESS_CPU_VARIANT=none turns the native kernels off: unset it"):
        build.choose()


def test_what_an_old_compiler_does_not_know_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "supported", lambda: ("avx512", "avx2"))
    monkeypatch.setenv("CXX", str(old_compiler(tmp_path)))
    assert build.choose() == "avx2"
    monkeypatch.setenv(build.CHOICE, "avx512")
    assert build.choose() == "avx512"
    monkeypatch.delenv(build.CHOICE)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.choose() == "avx512"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("avx513", "'avx513' is not known; did you mean 'avx512'[?] Known: amx, avx512, avx2, neon, none"),
        ("neon", "this processor cannot run 'neon': use avx2, none"),
    ],
    ids=["unknown", "unsupported"],
)
def test_a_wrong_choice_is_a_mistake(value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "supported", lambda: ("avx2",))
    monkeypatch.setenv(build.CHOICE, value)
    with pytest.raises(InputError, match=message) as caught:
        build.choose()
    assert caught.value.exit_code == USAGE


def test_a_processor_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "supported", lambda: ())
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    with pytest.raises(build.Unavailable, match="run on this processor .x86_64.: they need avx2 at least"):
        build.choose()
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    with pytest.raises(build.Unavailable, match=".riscv64.: they need one with amx, avx512, avx2, neon"):
        build.choose()


def test_doctor_says_so_in_one_line_without_a_compiler(cache: Path, tmp_path: Path) -> None:
    code = "from compress.cli.app import main; main(['doctor', '--json'])"
    environment = {**os.environ, "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    for name in ("C++ compiler", "CPU library") if build.supported() else ("C++ compiler",):
        assert checks[name]["value"] is None and checks[name]["ok"]
        assert checks[name]["note"].startswith("layers run on torch ops, slower: no C++ compiler on the PATH: install")
    assert int(checks["CPU kernel threads"]["value"]) >= 1
    assert not cache.exists()


def test_doctor_calls_a_wrong_choice_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.CHOICE, "avx513")
    monkeypatch.setenv("PATH", "")
    done = lmpress("doctor")
    assert done.code == 1 and "MISSING CPU kernels" in done.out and "did you mean 'avx512'? Known: " in done.out
