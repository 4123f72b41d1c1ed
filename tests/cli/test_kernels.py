"""`lmpress kernels` and recipes that name kernels: what travels in the folder, and what is wrong with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from compress.errors import InputError
from compress.formats.scheme import scheme_named
from compress.kernels import aot, reference
from compress.kernels import build as building
from compress.kernels.cpu import build as cpu
from compress.kernels.cuda import CudaKernel
from compress.kernels.exported import FOLDER, MANIFEST, read_manifest, verify
from compress.pipeline import RunOptions, run
from compress.recipe import parse
from compress.runtime.load import Execution, _refusals
from tests.command import lmpress
from tests.kernels.compiled import FakeCompiler, install

RTN = {"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 32}}


class Silent:
    """An observer that looks away."""

    def event(self, kind: str, /, **fields: Any) -> None:
        pass


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCompiler:
    """This machine: a compiler for GPUs, and none for C++."""
    return without_cxx(monkeypatch, tmp_path / "cache")


def without_cxx(monkeypatch: pytest.MonkeyPatch, cache: Path) -> FakeCompiler:
    def none(*_: object) -> Any:
        raise cpu.Unavailable("no C++ compiler on the PATH: install g++")

    monkeypatch.setattr(cpu, "variants", none)
    return install(monkeypatch, cache)


def document(model: Path, output: Path, *kernels: str, **export: Any) -> dict[str, Any]:
    folders = {"version": 1, "model": str(model), "output": str(output)}
    return folders | {"stages": [RTN], "export": {"kernels": list(kernels), **export}}


@pytest.fixture(scope="module")
def made(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `out`, a compressed checkpoint that carries kernels for sm_90, and the `cache` of its machine."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_cxx(monkeypatch, folder / "cache")
        run(parse(document(tiny_llama, folder / "out", "sm_90"), "recipe"), RunOptions(), Silent())
    return folder


@pytest.fixture
def checkpoint(made: Path, compiler: FakeCompiler, tmp_path: Path) -> Path:
    """A copy of the checkpoint, on the machine that made it."""
    shutil.copytree(made / "cache", tmp_path / "cache")
    return shutil.copytree(made / "out", tmp_path / "out")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_run_leaves_the_kernels_that_its_recipe_names(checkpoint: Path, compiler: FakeCompiler) -> None:
    entries = read_manifest(checkpoint)
    assert {entry.target for entry in entries} == {"sm_90"} and verify(checkpoint, building.source_of) == []
    names = {entry.name for entry in entries}
    assert {"w4a16_vector_g32_bf16", "w4a16_combine_bf16", "attention_combine_d64_bf16"} < names
    assert not any(name.startswith(("w8", "llm")) or name.endswith("fp16") for name in names)
    recipe = json.loads((checkpoint / "lmpress.json").read_text())["recipe"]
    assert recipe["export"]["kernels"] == ["sm_90"]


def test_the_same_recipe_gives_the_same_kernels(
    checkpoint: Path, compiler: FakeCompiler, tiny_llama: Path, tmp_path: Path
) -> None:
    again = parse(document(tiny_llama, tmp_path / "again", "sm_90"), "recipe")
    run(again, RunOptions(), Silent())
    assert contents(tmp_path / "again") == contents(checkpoint)


def test_a_run_that_stopped_before_its_kernels_goes_on_to_the_same_bytes(
    checkpoint: Path, compiler: FakeCompiler, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(Exception):
        pass

    def die(*_: object) -> None:
        raise Killed

    recipe = parse(document(tiny_llama, tmp_path / "killed", "sm_90"), "recipe")
    with monkeypatch.context() as killing:
        killing.setattr(building, "device_kernel", die)
        with pytest.raises(Killed):
            run(recipe, RunOptions(), Silent())
    assert not (tmp_path / "killed").exists()
    run(recipe, RunOptions(), Silent())
    assert contents(tmp_path / "killed") == contents(checkpoint)


def test_without_kernels_nothing_is_built(compiler: FakeCompiler, tiny_llama: Path, tmp_path: Path) -> None:
    run(parse(document(tiny_llama, tmp_path / "out"), "recipe"), RunOptions(), Silent())
    assert not (tmp_path / "out" / FOLDER).exists() and compiler.asked == []


@pytest.mark.parametrize(
    ("kernels", "export", "words"),
    [
        (["host"], {}, "field 'export.kernels': host: cannot be built here: no C++ compiler on the PATH: install g++"),
        (["sm_90"], {"scale_dtype": "float32"}, "sm_90: scales are torch.float32"),
        (["sm_70"], {}, "export.kernels.0"),
        (["sm_90", "sm_90"], {}, "sm_90 is given twice: keep one"),
    ],
)
def test_kernels_that_cannot_be_had_are_told_before_any_work(
    compiler: FakeCompiler, tiny_llama: Path, tmp_path: Path, kernels: list[str], export: dict[str, Any], words: str
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(document(tiny_llama, tmp_path / "out", *kernels, **export)))
    before = sorted(tmp_path.iterdir())
    for arguments in (["run", str(file)], ["run", str(file), "--dry-run"], ["plan", str(file)]):
        done = lmpress(*arguments)
        assert (done.code, done.out) == (2, "") and words in done.err and done.err.count("\n") == 1, done.err
    assert sorted(tmp_path.iterdir()) == before


def test_a_scheme_that_no_kernel_serves_is_refused_by_the_plan(
    compiler: FakeCompiler, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aot, "variants", lambda: ())
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(document(tiny_llama, tmp_path / "out", "gfx942")))
    done = lmpress("plan", str(file))
    assert done.code == 2
    assert "gfx942: no kernel multiplies W4A16 (model.layers.0." in done.err and "leave gfx942 out" in done.err


def test_build_replaces_the_targets_it_is_given(checkpoint: Path, compiler: FakeCompiler) -> None:
    done = lmpress("kernels", "build", str(checkpoint), "--target", "gfx942", "--target", "sm_80", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["left_out"] == {} and {row["target"] for row in told["kernels"]} == {"sm_80", "sm_90", "gfx942"}
    assert all(row["built_here"] for row in told["kernels"])
    assert lmpress("kernels", "verify", str(checkpoint)).code == 0


def test_build_takes_every_target_that_can_be_built_and_names_the_others(
    checkpoint: Path, compiler: FakeCompiler
) -> None:
    done = lmpress("kernels", "build", str(checkpoint))
    assert done.code == 0
    assert done.err == "left out: host: cannot be built here: no C++ compiler on the PATH: install g++\n"
    assert {entry.target for entry in read_manifest(checkpoint)} == set(aot.TARGETS)
    compiler.present = False
    nothing = lmpress("kernels", "build", str(checkpoint))
    assert nothing.code == 1 and "kernels can be built for no target here" in nothing.err


@pytest.mark.parametrize(
    ("target", "words"),
    [("sm90", "'sm90' is not known; did you mean 'sm_90'?"), ("host", "--target: host: cannot be built here")],
)
def test_build_names_targets_that_cannot_be_had(
    checkpoint: Path, compiler: FakeCompiler, target: str, words: str
) -> None:
    before = contents(checkpoint)
    done = lmpress("kernels", "build", str(checkpoint), "--target", target)
    assert done.code == 2 and words in done.err and contents(checkpoint) == before


def test_list_tells_what_would_run(
    checkpoint: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = json.loads(lmpress("kernels", "list", str(checkpoint), "--json").out)["kernels"]
    assert len(rows) == len(read_manifest(checkpoint)) and all(row["built_here"] for row in rows)
    assert lmpress("kernels", "list", str(checkpoint)).out.count("yes: built here") == len(rows)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    done = lmpress("kernels", "list", str(checkpoint))
    assert done.code == 0 and done.out.count("if trusted") == len(rows)
    monkeypatch.setattr(building, "source_of", lambda entry: "0" * 64)
    assert lmpress("kernels", "list", str(checkpoint)).out.count("no: another source") == len(rows)


def test_verify_finds_a_flipped_byte_and_leaves_with_1(checkpoint: Path, compiler: FakeCompiler) -> None:
    good = lmpress("kernels", "verify", str(checkpoint), "--json")
    assert good.code == 0 and json.loads(good.out)["ok"]
    file = checkpoint / FOLDER / "w4a16_wide_g32_bf16.sm_90.cubin"
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)
    (checkpoint / FOLDER / "left.over").touch()
    bad = lmpress("kernels", "verify", str(checkpoint))
    assert (bad.code, bad.out) == (1, "")
    assert f"{file}: has " in bad.err and "left.over: is not in manifest.json: remove it" in bad.err
    told = json.loads(lmpress("kernels", "verify", str(checkpoint), "--json").out)
    assert [row["problem"] for row in told["findings"]] == ["changed", "extra"] and not told["ok"]


def test_folders_without_kernels_or_with_a_broken_manifest(tiny_llama: Path, checkpoint: Path) -> None:
    for verb in ("list", "verify"):
        done = lmpress("kernels", verb, str(tiny_llama))
        assert done.code == 1 and "holds no kernels: build some with `lmpress kernels build" in done.err
    (checkpoint / FOLDER / MANIFEST).write_text("[]")
    for verb in ("list", "verify", "build"):
        done = lmpress("kernels", verb, str(checkpoint))
        assert done.code == 1 and "manifest.json: is a JSON list" in done.err


def test_generate_hands_the_trust_on(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def load(folder: Path, device: object, dtype: object, execution: Execution) -> None:
        seen.append(execution.trust_kernels)
        raise InputError("stop here")

    monkeypatch.setattr("compress.runtime.load.load_model", load)
    for flags in ((), ("--trust-kernels",)):
        assert lmpress("generate", str(checkpoint), "--prompt", "a", *flags).err == "lmpress: stop here\n"
    assert seen == [False, True]


def test_a_kernel_that_leaves_layers_to_a_slower_one_is_a_fallback() -> None:
    schemes = [scheme_named("W4A16", 64), scheme_named("W8A8"), scheme_named("W4A16", 64)]
    told = _refusals(CudaKernel(), schemes, torch.device("cpu"))
    assert told == [{"name": "cuda kernels", "reason": "runs on NVIDIA GPUs alone"}]
    assert _refusals(reference, schemes, torch.device("cpu")) == [] == _refusals(None, schemes, torch.device("cpu"))
