"""What serves what, what is built once, and which binary may run: the trust rule, case by case."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from compress.errors import InputError
from compress.formats.pattern import Pattern
from compress.formats.scheme import FLOATS, SCHEMES, Scheme, pruned, scheme_named
from compress.kernels import aot, build, trust
from compress.kernels.cpu import build as cpu
from compress.kernels.exported import FOLDER, MANIFEST, Entry, read_manifest, verify, write
from compress.recipe import Export
from tests.kernels.compiled import FakeCompiler, install

BF16 = torch.bfloat16
W4A16 = scheme_named("W4A16", 64)
SPARSE = pruned(W4A16, Pattern(2, 4))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCompiler:
    """This machine, with a compiler."""
    return install(monkeypatch, tmp_path / "cache")


@pytest.fixture
def elsewhere(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A checkpoint folder with kernels for sm_90 that another machine, with another compiler, built."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    with monkeypatch.context() as there:
        there.setenv("XDG_CACHE_HOME", str(tmp_path / "their cache"))
        compiler.flavour = "their"
        write(folder, build.build(wanted(), ["sm_90"]), ["sm_90"])
    compiler.flavour = "plain"
    compiler.asked.clear()
    return folder


def wanted(scheme: Scheme = W4A16, shape: tuple[int, int] = (64, 128), dtype: torch.dtype = BF16) -> build.Wanted:
    return build.Wanted({"layer": (scheme, shape)}, dtype)


def variant(name: str = "w4a16_vector_g64_bf16") -> aot.Variant:
    return next(one for one in aot.variants() if one.name == name)


def test_a_recipe_may_name_every_target() -> None:
    (literal, _) = get_args(Export.model_fields["kernels"].annotation)
    assert get_args(literal) == build.TARGETS


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("target", build.TARGETS)
def test_every_scheme_has_a_kernel_for_every_target(name: str, target: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert build.refuses(scheme_named(name), dtype, target, (64, 128)) is None


@pytest.mark.parametrize(
    ("scheme", "dtype", "target", "shape", "words"),
    [
        (scheme_named("W4A16", 16), BF16, "sm_90", (64, 128), "groups of 32 columns or a multiple, not 16"),
        (W4A16, torch.float32, "sm_90", (64, 128), r"scales are torch.float32, .*export.scale_dtype"),
        (W4A16, BF16, "gfx942", (24, 128), "a weight of 24 x 128 is not a multiple of 16"),
        (scheme_named("W4A16", 20), BF16, "host", (64, 120), "multiples of 8 columns, not 20"),
        (SPARSE, BF16, "gfx942", (64, 128), "2:4 weights need NVIDIA's sparse tensor cores, and W4A16.2:4 has no"),
        (SPARSE, BF16, "sm_90", (64, 120), "a 2:4 weight of 64 x 120 has no multiple of 16 columns"),
        (pruned(scheme_named("W8A16"), Pattern(2, 4)), BF16, "sm_90", (64, 128), "W8A16.2:4 has no 2:4 kernel: int8"),
    ],
)
def test_what_no_kernel_serves_is_refused(
    scheme: Scheme, dtype: torch.dtype, target: str, shape: tuple[int, int], words: str, compiler: FakeCompiler
) -> None:
    with pytest.raises(InputError, match=f"^recipe: {target}: .*({words}).*\\(layer\\): leave {target} out") as caught:
        build.check(wanted(scheme, shape, dtype), [target], "recipe")
    assert caught.value.exit_code == 2


def test_scheme_decides_which_variants_are_built(compiler: FakeCompiler) -> None:
    names = {one.name for one in build.chosen(wanted())}
    assert {"w4a16_vector_g64_bf16", "w4a16_narrow_g64_bf16", "w4a16_wide_g64_bf16", "w4a16_combine_bf16"} < names
    assert {name for name in names if name.startswith("w")} == {name for name in names if name.startswith("w4a16")}
    assert any(name.startswith("attention_") for name in names) and not any(name.endswith("fp16") for name in names)
    int8 = {one.name for one in build.chosen(wanted(scheme_named("LLM_INT8"), dtype=torch.float16))}
    assert "llm_int8_wide_fp16" in int8 and not any(name.startswith(("w4", "w8")) for name in int8)


@pytest.mark.parametrize("scheme", [SPARSE, *(pruned(one, Pattern(2, 4)) for one in (FLOATS, SCHEMES["W8A8"]))])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_2_4_weights_have_kernels_for_nvidia(scheme: Scheme, target: str, compiler: FakeCompiler) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert build.refuses(scheme, dtype, target, (64, 128)) is None
    names = {one.name for one in build.chosen(wanted(scheme)) if one.format != aot.ATTENTION}
    kinds = {
        "W4A16+2:4": {"w4_narrow_g64", "w4_wide_g64", "w4_combine"},
        "W8A8+2:4": {"w8_quantize", "w8_narrow", "w8_wide", "w8_combine"},
        "W16A16+2:4": {"w16_narrow", "w16_wide", "w16_combine"},
    }
    assert names == {f"sparse24_{kind}_bf16" for kind in kinds[scheme.name]}


def test_2_4_kernels_are_exported_with_their_compiler(compiler: FakeCompiler, tmp_path: Path) -> None:
    entries = {entry.name: entry for entry in write(tmp_path, build.build(wanted(SPARSE), ["sm_90"]), ["sm_90"])}
    entry = entries["sparse24_w4_narrow_g64_bf16"]
    assert entry.builder.keys() == {"lmpress", "nvrtc"} and entry.file == f"{entry.name}.sm_90.cubin"
    assert (entry.format, entry.constants["SPAN"], entry.symbol) == ("sparse24", 64, "product")
    assert not {name for name, _ in entry.arguments} & {name for name, _ in aot.SCRATCH}
    assert verify(tmp_path, build.source_of) == []
    compiler.nvrtc = False
    assert build.runnable(variant(entry.name), "sm_90", tmp_path, trusted=False).entry == entry


def test_2_4_kernels_need_nvrtc(compiler: FakeCompiler) -> None:
    compiler.nvrtc = False
    assert build.problem(wanted(), "sm_90") is None
    with pytest.raises(InputError, match="sm_90: cannot be built here: NVRTC is not installed: pip install it"):
        build.check(wanted(SPARSE), ["sm_90"], "recipe")
    with pytest.raises(InputError, match="sparse24_w4_combine_bf16 for sm_90 cannot be built here: NVRTC"):
        build.device_kernel(variant("sparse24_w4_combine_bf16"), "sm_90")


def test_targets_that_cannot_be_built_are_named(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.present = False
    with pytest.raises(InputError, match="sm_80: cannot be built here: Triton is not installed: pip install it"):
        build.check(wanted(), ["sm_80"], "recipe")

    def none() -> tuple[str, ...]:
        raise cpu.Unavailable("no C++ compiler on the PATH: install g++")

    monkeypatch.setattr(cpu, "variants", none)
    with pytest.raises(InputError, match="host: cannot be built here: no C.. compiler on the PATH: install g"):
        build.check(wanted(), ["host"], "recipe")


def test_what_was_built_once_is_found_again(compiler: FakeCompiler) -> None:
    first = build.build(wanted(), ["sm_90", "gfx942"])
    asked = len(compiler.asked)
    assert asked == len(first) == 2 * len(build.chosen(wanted()))
    compiler.present = False
    assert build.build(wanted(), ["sm_90", "gfx942"]) == first
    compiler.present = True
    assert all(trust.built_here(one.entry.sha256) for one in first)
    assert {one.entry.file.rpartition(".")[2] for one in first} == {"cubin", "hsaco"}


def test_progress_counts_what_is_built(compiler: FakeCompiler) -> None:
    told: list[tuple[str, int, int]] = []
    built = build.build(wanted(), ["sm_90"], lambda *step: told.append(step))
    assert [done for _, done, _ in told] == list(range(len(built))) and {total for *_, total in told} == {len(built)}
    assert told[0][0] == built[0].entry.file.removesuffix(".cubin")


def test_a_damaged_cache_is_built_again(compiler: FakeCompiler) -> None:
    first = build.device_kernel(variant(), "sm_90")
    (kept,) = trust.cache_folder().glob("*.bin")
    kept.write_bytes(b"plain w4a16_vector_g64_bf16 for sm_9x")
    assert build.device_kernel(variant(), "sm_90") == first
    (about,) = trust.cache_folder().glob("*.json")
    about.write_text("{}")
    assert build.device_kernel(variant(), "sm_90") == first
    assert len(compiler.asked) == 3


def test_a_planted_binary_without_a_record_is_not_taken(compiler: FakeCompiler) -> None:
    honest = build.device_kernel(variant(), "sm_90")
    (binary,) = trust.cache_folder().glob("*.bin")
    (about,) = trust.cache_folder().glob("*.json")
    document = json.loads(about.read_text())
    binary.write_bytes(b"planted")
    about.write_text(json.dumps(document | {"nbytes": 7, "sha256": hashlib.sha256(b"planted").hexdigest()}))
    assert build.device_kernel(variant(), "sm_90").binary == honest.binary


def test_own_kernels_in_a_checkpoint_run(compiler: FakeCompiler, tmp_path: Path) -> None:
    write(tmp_path, build.build(wanted(), ["sm_90"]), ["sm_90"])
    assert verify(tmp_path, build.source_of) == []
    compiler.present = False
    for path in trust.cache_folder().glob("*.bin"):
        path.unlink()  # so that it can only come from the checkpoint
    found = build.runnable(variant(), "sm_90", tmp_path, trusted=False)
    assert found.binary == b"plain w4a16_vector_g64_bf16 for sm_90"


def test_kernels_from_elsewhere_are_replaced_by_our_own(elsewhere: Path, compiler: FakeCompiler) -> None:
    found = build.runnable(variant(), "sm_90", elsewhere, trusted=False)
    assert found.binary == b"plain w4a16_vector_g64_bf16 for sm_90"
    assert compiler.asked == [("w4a16_vector_g64_bf16", "sm_90")]


def test_kernels_from_elsewhere_stop_the_run_where_nothing_can_be_built(
    elsewhere: Path, compiler: FakeCompiler
) -> None:
    compiler.present = False
    file = elsewhere / FOLDER / "w4a16_vector_g64_bf16.sm_90.cubin"
    with pytest.raises(InputError) as caught:
        build.runnable(variant(), "sm_90", elsewhere, trusted=False)
    told = str(caught.value)
    assert told.startswith(f"{file}: was not built on this machine and is not run (") and "\n" not in told
    assert "Triton is not installed" in told and told.endswith("give --trust-kernels to run it all the same")
    assert not trust.built_here(hashlib.sha256(file.read_bytes()).hexdigest())


def test_kernels_from_elsewhere_run_when_they_are_trusted(elsewhere: Path, compiler: FakeCompiler) -> None:
    compiler.present = False
    found = build.runnable(variant(), "sm_90", elsewhere, trusted=True)
    assert found.binary == b"their w4a16_vector_g64_bf16 for sm_90"
    with pytest.raises(InputError, match="w4a16_vector_g64_bf16 for sm_80 cannot be built here: Triton"):
        build.runnable(variant(), "sm_80", elsewhere, trusted=True)


@pytest.mark.parametrize("trusted", [True, False])
def test_a_flipped_byte_stops_the_run_by_name(elsewhere: Path, trusted: bool, compiler: FakeCompiler) -> None:
    file = elsewhere / FOLDER / "w4a16_vector_g64_bf16.sm_90.cubin"
    file.write_bytes(file.read_bytes().replace(b"their", b"thair"))
    with pytest.raises(InputError, match=r"w4a16_vector_g64_bf16.sm_90.cubin: .*was changed after it was built"):
        build.runnable(variant(), "sm_90", elsewhere, trusted)


@pytest.mark.parametrize(
    "change",
    [{"source_sha256": "0" * 64}, {"arguments": [["x", "*bf16"]]}],
    ids=["another source", "another signature"],
)
def test_not_even_trust_runs_another_versions_kernels(
    elsewhere: Path, compiler: FakeCompiler, change: dict[str, object]
) -> None:
    file = elsewhere / FOLDER / MANIFEST
    document = json.loads(file.read_text())
    for row in document["kernels"]:
        row.update(change)
    file.write_text(json.dumps(document))
    assert build.runnable(variant(), "sm_90", elsewhere, trusted=True).binary.startswith(b"plain")
    compiler.present = False
    other = variant("w4a16_wide_g64_bf16")
    with pytest.raises(InputError, match="built from another version's source and is not run .*kernels build"):
        build.runnable(other, "sm_90", elsewhere, trusted=True)


def test_a_manifest_that_was_written_anew_is_read_anew(elsewhere: Path, compiler: FakeCompiler) -> None:
    compiler.present = False
    assert build.runnable(variant(), "sm_90", elsewhere, trusted=True).binary.startswith(b"their")
    compiler.present = True
    write(elsewhere, build.build(wanted(), ["sm_90"]), ["sm_90"])
    compiler.present = False
    assert build.runnable(variant(), "sm_90", elsewhere, trusted=False).binary.startswith(b"plain")


def test_sources_decide_what_is_stale(compiler: FakeCompiler) -> None:
    entry = build.device_kernel(variant(), "sm_90").entry
    assert build.source_of(entry) == entry.source_sha256
    assert build.source_of(replace(entry, name="w3a16_vector")) is None
    assert build.source_of(replace(entry, target="sm_70")) is None
    assert aot.source_sha256(variant()) != aot.source_sha256(variant("w4a16_vector_g32_bf16"))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: FakeCompiler) -> list[str]:
    """A machine whose C++ compiler writes libraries that say what they are."""
    made: list[str] = []

    def compile_library(name: str) -> Path:
        made.append(name)
        library = trust.cache_folder() / f"{name}.so"
        library.write_bytes(f"library {name}".encode())
        trust.record(cpu.sha256_of(library))
        return library

    monkeypatch.setattr(cpu, "variants", lambda: ("avx512", "avx2"))
    monkeypatch.setattr(cpu, "compiler", lambda: cpu.Compiler(("c++",), "c++ 12"))
    monkeypatch.setattr(cpu, "compile_library", compile_library)
    monkeypatch.setattr(build, "_platform", lambda: "linux-x86_64")
    return made


def test_host_libraries_are_exported_for_every_instruction_set(host: list[str], tmp_path: Path) -> None:
    entries = write(tmp_path, build.build(wanted(), ["host"]), ["host"])
    assert [entry.file for entry in entries] == ["avx2.linux-x86_64.so", "avx512.linux-x86_64.so"]
    assert entries == read_manifest(tmp_path) and verify(tmp_path, build.source_of) == []
    assert entries[0].builder["compiler"] == "c++ 12" and host == ["avx512", "avx2"]


def test_a_trusted_library_is_checked_and_copied_to_the_cache(
    host: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, build.build(wanted(), ["host"]), ["host"])
    place = build.trusted_library(tmp_path, "avx2")
    assert place.read_bytes() == b"library avx2" and place.parent == trust.cache_folder() and place.suffix == ".so"
    with pytest.raises(InputError, match="holds no neon library for linux-x86_64"):
        build.trusted_library(tmp_path, "neon")

    def other(entry: Entry) -> str | None:
        return None

    with monkeypatch.context() as later:
        later.setattr(build, "source_of", other)
        with pytest.raises(InputError, match="avx2.linux-x86_64.so: was built from another version's source"):
            build.trusted_library(tmp_path, "avx2")
    (tmp_path / FOLDER / "avx2.linux-x86_64.so").write_bytes(b"library avx3")
    with pytest.raises(InputError, match="avx2.linux-x86_64.so: .*was changed after it was built"):
        build.trusted_library(tmp_path, "avx2")
