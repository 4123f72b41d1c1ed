"""CUDA C++ for 2:4 weights: every variant for every NVIDIA target, without a GPU, and a look at the code that came out.

How fast any of it runs is not tested here or anywhere: no GPU was at hand when it was written.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from compress.errors import InputError
from compress.kernels import aot, nvrtc
from compress.kernels.sparse import launch as sparse
from compress.kernels.triton.launch import DTYPES, GRID_LIMIT, Shape
from tests.house import ROOT

CACHE = ROOT / "build" / "nvrtc"
TARGETS = [target for target in aot.TARGETS if target.startswith("sm_")]
VARIANTS = {variant.name: variant for variant in aot.variants() if variant.compiler == "nvrtc"}
# Of what a program gets without asking (driver.FREE_SHARED_BYTES).
SHARED = 48 << 10

needs_nvrtc = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))


def jobs(target: str) -> list[str]:
    """All variants in bfloat16, and every third in float16, which differs in types alone: another each target."""
    half = [name for name in VARIANTS if name.endswith("fp16")]
    return [name for name in VARIANTS if name.endswith("bf16")] + half[TARGETS.index(target) :: len(TARGETS)]


def macros(variant: aot.Variant) -> dict[str, int]:
    return variant.constants | {"WARPS": variant.warps}


def compiled(variant: aot.Variant, target: str) -> nvrtc.Output:
    """What NVRTC makes of it, kept below build/ so that a second run of the tests is quick."""
    key = "\n".join((aot.source_sha256(variant), target, nvrtc.version(), nvrtc.sources_sha256()))
    place = CACHE / f"{variant.name}.{target}.{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if not place.exists():
        made = nvrtc.compile_source(f"{variant.module}.cu", macros(variant), target)
        CACHE.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps([made.cubin.hex(), made.ptx, made.log]))
    cubin, ptx, log = json.loads(place.read_text())
    return nvrtc.Output(bytes.fromhex(cubin), ptx, log)


@pytest.fixture(scope="module")
def outputs() -> dict[str, dict[str, nvrtc.Output]]:
    """Target -> variant -> what came out for it."""
    return {target: {name: compiled(VARIANTS[name], target) for name in jobs(target)} for target in TARGETS}


Outputs = dict[str, dict[str, nvrtc.Output]]


@needs_nvrtc
@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_compiles_for_its_arguments(outputs: Outputs, target: str) -> None:
    for name, made in outputs[target].items():
        variant = VARIANTS[name]
        assert made.cubin[:4] == b"\x7fELF" and variant.function.encode() in made.cubin, name
        assert str(ROOT).encode() not in made.cubin, "the binary knows where it was built"
        assert f".target {target}" in made.ptx and made.ptx.count(".entry ") == 1, name
        parameters = re.findall(r"\.param \.([a-z])(\d+)", made.ptx.partition(".entry")[2].partition(")")[0])
        wanted = {"*": ("u", "64"), "i32": ("u", "32"), "fp32": ("f", "32")}
        kinds = [wanted["*" if kind.startswith("*") else kind] for kind in variant.signature.values()]
        assert parameters == kinds, name


@needs_nvrtc
@pytest.mark.parametrize("target", TARGETS)
def test_products_run_on_sparse_tensor_cores(outputs: Outputs, target: str) -> None:
    """As many products as a block has, all of the ordered kind; weights 16 bytes at a time, tokens ahead of use."""
    for name, made in outputs[target].items():
        variant = VARIANTS[name]
        if variant.module != "product":
            continue
        fixed = variant.constants
        deep = 2 if fixed["BITS"] == 8 else 4
        shape = "m16n8k64" if fixed["BITS"] == 8 else "m16n8k32"
        word = f"mma.sp::ordered_metadata.sync.aligned.{shape}"
        found = made.ptx.count("mma.sp"), made.ptx.count(word)
        assert found == (deep * fixed["STRIPS"] * fixed["TOKEN_TILES"],) * 2, name
        assert made.ptx.count("ldmatrix") == deep * fixed["TOKEN_TILES"], name
        loads = re.findall(r"ld\.global\.nc[.\w:]*\.v4", made.ptx)
        assert len(loads) >= fixed["STRIPS"] * fixed["BITS"] // 4 and "cp.async.cg" in made.ptx, name


@needs_nvrtc
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_spilled(outputs: Outputs, target: str) -> None:
    for name, made in outputs[target].items():
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in made.log, (name, made.log)
        (registers,) = re.findall(r"Used (\d+) registers", made.log)
        assert int(registers) <= 255
        shared = re.findall(r"(\d+) bytes smem", made.log)
        assert sum(map(int, shared)) <= SHARED and bool(shared) == (VARIANTS[name].module != "combine"), name


@needs_nvrtc
@pytest.mark.parametrize("target", TARGETS)
def test_the_machine_code_has_them_too(outputs: Outputs, target: str, tmp_path: Path) -> None:
    """Not a trap in the place of what a target lacks: read by the nvdisasm inside Triton."""
    triton = importlib.util.find_spec("triton")
    tool = Path(triton.origin or "").parent / "backends" / "nvidia" / "bin" / "nvdisasm" if triton else None
    if tool is None or not tool.exists():
        pytest.skip("there is no nvdisasm")
    for kind in ("w16_narrow", "w8_narrow", "w4_narrow_g128"):
        made, file = outputs[target][f"sparse24_{kind}_bf16"], tmp_path / "kernel.cubin"
        file.write_bytes(made.cubin)
        said = subprocess.run([str(tool), str(file)], capture_output=True, text=True, check=True).stdout
        instruction = "IMMA.SP" if kind == "w8_narrow" else "HMMA.SP"
        assert said.count(instruction) >= made.ptx.count("mma.sp") and "BPT.TRAP" not in said, kind


@needs_nvrtc
def test_an_artifact_is_complete() -> None:
    variant = VARIANTS["sparse24_w8_quantize_bf16"]
    artifact = aot.compile_variant(variant, "sm_90")
    assert artifact.binary == compiled(variant, "sm_90").cubin
    assert (artifact.symbol, artifact.threads, artifact.shared_bytes) == ("quantize", 256, 0)
    assert artifact.arguments == tuple(variant.signature.items()), "no scratch pointers of Triton's"


@needs_nvrtc
def test_binaries_do_not_depend_on_where_they_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = VARIANTS["sparse24_w4_narrow_g64_bf16"]
    here = nvrtc.compile_source("product.cu", macros(variant), "sm_90")
    shutil.copytree(nvrtc.SOURCES, tmp_path / "elsewhere")
    monkeypatch.setattr(nvrtc, "SOURCES", tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    assert nvrtc.compile_source("product.cu", macros(variant), "sm_90").cubin == here.cubin


def test_every_source_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = VARIANTS["sparse24_w4_narrow_g64_bf16"]
    before = aot.source_sha256(variant)
    assert before != aot.source_sha256(replace(variant, warps=8))
    shutil.copytree(nvrtc.SOURCES, tmp_path / "elsewhere")
    monkeypatch.setattr(nvrtc, "SOURCES", tmp_path / "elsewhere")
    assert aot.source_sha256(variant) == before
    (tmp_path / "elsewhere" / "sums.h").write_text("// another\n")
    assert aot.source_sha256(variant) != before


@needs_nvrtc
def test_what_does_not_compile_is_told_in_one_line() -> None:
    with pytest.raises(InputError, match=r"^kernels: quantize.cu for sm_90: .*error.*WARPS") as caught:
        nvrtc.compile_source("quantize.cu", {"BF16": 1}, "sm_90")
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="sparse24_w4_combine_bf16 needs NVIDIA's sparse tensor cores, which gfx942"):
        aot.compile_variant(VARIANTS["sparse24_w4_combine_bf16"], "gfx942")


def test_what_is_missing_is_told_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> None:
        return None

    nvrtc.unavailable.cache_clear()
    with monkeypatch.context() as without:
        without.setattr(nvrtc, "find_spec", missing)
        assert aot.unavailable("nvrtc") == "cuda-bindings is not installed: pip install 'lmpress[kernels]'"
    nvrtc.unavailable.cache_clear()
    pathfinder = pytest.importorskip("cuda.pathfinder")

    def not_found(name: str) -> None:
        raise pathfinder.DynamicLibNotFoundError(name)

    with monkeypatch.context() as without:
        without.setattr(pathfinder, "load_nvidia_dynamic_lib", not_found)
        assert nvrtc.unavailable() == "NVRTC is not installed: pip install 'lmpress[kernels]'"
        with pytest.raises(InputError, match="kernels: NVRTC is not installed"):
            aot.compile_variant(VARIANTS["sparse24_w4_combine_bf16"], "sm_90")
    nvrtc.unavailable.cache_clear()


def test_variants_are_what_plans_name() -> None:
    assert len(VARIANTS) == 2 * (3 + 4 + 7)
    for name, variant in VARIANTS.items():
        assert variant.format == "sparse24" and name.startswith("sparse24_")
        assert f"{variant.module}.cu" in nvrtc.sources()
    assert sparse.name("wide", sparse.Kept(4, 256), "fp16") == "sparse24_w4_wide_g128_fp16"


def test_plans_name_variants_and_give_them_their_scalars() -> None:
    """All of them, and no variant is left over."""
    used = set()
    weights = [sparse.Kept(16), sparse.Kept(8), *(sparse.Kept(4, group) for group in (None, 32, 64, 128, 256))]
    for dtype, tokens, kept in itertools.product(DTYPES, (1, 16, 17, 300), weights):
        plan = sparse.product(Shape(tokens, 4096, 2048), kept, dtype, 132)
        for step in plan.steps:
            signature = VARIANTS[step.name].signature
            used.add(step.name)
            assert set(step.scalars) == {name for name, kind in signature.items() if not kind.startswith("*")}
            assert all(1 <= size < 1 << 31 for size in step.grid) and max(step.grid[1:]) <= GRID_LIMIT
            assert "partial" in plan.buffers or "partial" not in signature or step.scalars["split"] == 1
    assert used == set(VARIANTS)
