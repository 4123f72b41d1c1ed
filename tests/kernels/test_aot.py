"""Ahead-of-time compilation: every variant for every target, without a GPU, and a look at the code that came out.

How fast any of it runs is not tested here or anywhere: no GPU was at hand when it was written.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from compress.errors import InputError
from compress.kernels import aot
from compress.kernels.triton import launch
from tests.kernels import assembly

ROOT = Path(__file__).parent.parent.parent
# Those of Triton: test_nvrtc.py has the others.
VARIANTS = {variant.name: variant for variant in aot.variants() if variant.compiler == "triton"}
# Kinds whose arithmetic is a tensor-core product.
PRODUCTS = ("narrow", "wide", "attend", "llm_int8_combine")
# What a device has for one program, in bytes.
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}

needs_triton = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))


def jobs(target: str) -> list[str]:
    """All variants in bfloat16, and every fourth in float16, which differs in the types alone: another each target."""
    half = [name for name in VARIANTS if name.endswith("fp16")]
    return [name for name in VARIANTS if name.endswith("bf16")] + half[aot.TARGETS.index(target) :: len(aot.TARGETS)]


@pytest.fixture(scope="module")
def looks() -> Iterator[dict[str, list[assembly.Look]]]:
    """Target -> what came out for it."""
    with assembly.compilers() as pool:
        futures = {
            target: [pool.submit(assembly.look, name, target) for name in jobs(target)] for target in aot.TARGETS
        }
        yield {target: [future.result() for future in some] for target, some in futures.items()}


@needs_triton
@pytest.mark.parametrize("target", aot.TARGETS)
def test_every_variant_compiles(looks: dict[str, list[assembly.Look]], target: str) -> None:
    """Each artifact is complete, and its arguments are those of the entry in its binary, scratch pointers included."""
    assert {look.artifact.variant.name for look in looks[target]} == set(jobs(target))
    for look in looks[target]:
        artifact = look.artifact
        assert artifact.binary[:4] == b"\x7fELF" and artifact.symbol.encode() in artifact.binary, look
        assert str(ROOT).encode() not in artifact.binary, "the binary knows where it was built"
        assert artifact.threads == artifact.variant.warps * (64 if target == "gfx942" else 32)
        assert artifact.shared_bytes <= SHARED[target], look
        kinds = ["pointer" if kind.startswith("*") else kind[-2:] for _, kind in artifact.arguments]
        assert list(look.arguments) == kinds, look


@needs_triton
@pytest.mark.parametrize("target", aot.TARGETS)
def test_products_run_on_tensor_cores(looks: dict[str, list[assembly.Look]], target: str) -> None:
    """Unpacked weights on the newest that the target has; int8 and attention's few rows on that or the one before."""
    newest = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}[target]
    for look in looks[target]:
        name = look.artifact.variant.name
        if "a16_narrow" in name or "a16_wide" in name:
            assert look.counts[newest] > 0, look
        elif any(kind in name for kind in PRODUCTS):
            assert look.counts[newest] + look.counts.get("mma.sync", 0) > 0, look


@needs_triton
@pytest.mark.parametrize("target", aot.TARGETS)
def test_weights_are_loaded_16_bytes_at_a_time(looks: dict[str, list[assembly.Look]], target: str) -> None:
    """By each thread of a matrix-vector product into registers, and by the others ahead of their use."""
    for look in looks[target]:
        name, constants = look.artifact.variant.name, look.artifact.variant.constants
        if "vector" in name:
            wide = "global_load_dwordx4" if target == "gfx942" else "ld.global.v4"
            lanes = 64 if target == "gfx942" else 32
            assert look.counts[wide] >= constants["BLOCK_N"] * constants["BLOCKS"] * 4 // lanes, look
        elif target != "gfx942" and any(kind in name for kind in ("narrow", "wide", "attend")):
            assert look.counts["cp.async.cg"] > 0, look


@needs_triton
@pytest.mark.parametrize("target", aot.TARGETS)
def test_nothing_is_spilled(looks: dict[str, list[assembly.Look]], target: str) -> None:
    if any(look.registers is None for look in looks[target]):
        pytest.skip("this Triton brings no cuobjdump, which reads the use of registers")
    assert [str(look) for look in looks[target] if look.stack_bytes or look.spills] == []


@needs_triton
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_binaries_do_not_depend_on_where_they_are_built(tmp_path: Path, target: str) -> None:
    """A copy of the package elsewhere, without a cache, gives the same bytes, so that hashes mean something."""
    shutil.copytree(ROOT / "compress", tmp_path / "compress", ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "from compress.kernels import aot; import hashlib; v = aot.variants()[0]; "
        f"a = aot.compile_variant(v, {target!r}); print(aot.__file__, hashlib.sha256(a.binary).hexdigest())"
    )
    said = []
    for folder in (ROOT, tmp_path):
        environment = os.environ | {"PYTHONPATH": str(folder), "TRITON_CACHE_DIR": str(tmp_path / folder.name)}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split())
    assert Path(said[0][0]).parts[:3] != Path(said[1][0]).parts[:3]
    assert said[0][1] == said[1][1]


def plans() -> list[launch.Plan]:
    """Every kind of plan, over sizes, formats, heads and types."""
    found = []
    for dtype in launch.DTYPES:
        for tokens in (1, 2, 16, 17, 300):
            shape = launch.Shape(tokens, 4096, 2048)
            for bits, groups in ((4, (None, 32, 64, 128, 256)), (8, (None, 64, 128))):
                found += [launch.packed_product(shape, launch.Packing(bits, g), dtype, 132) for g in groups]
            found += [launch.int8_product(shape, dtype, 132, outliers) for outliers in (None, 0, 5)]
        for width in launch.HEAD_WIDTHS:
            for int8 in (False, True):
                heads = launch.Heads(32, 8, width, int8)
                found += [launch.attention(heads, launch.Scores(0.1), (1, pages), dtype, 132) for pages in (2, 64)]
    return found


def test_plans_name_variants_and_give_them_their_scalars() -> None:
    """All of them, and no variant is left over."""
    used = set()
    for plan in plans():
        for step in plan.steps:
            signature = VARIANTS[step.name].signature
            used.add(step.name)
            assert set(step.scalars) == {name for name, kind in signature.items() if not kind.startswith("*")}
            assert all(1 <= size < 1 << 31 for size in step.grid) and max(step.grid[1:]) <= launch.GRID_LIMIT
            promised = {name: value for name, value in step.scalars.items() if name in launch.MULTIPLES_OF_16}
            assert all(value % 16 == 0 for value in promised.values())
            assert set(plan.buffers) & set(signature) or len(plan.steps) == 1
    assert used == set(VARIANTS)


def test_parts_cover_every_step_and_none_is_idle() -> None:
    for tiles in (1, 5, 64, 1000):
        for steps in range(1, 200, 7):
            split = launch.parts(tiles, steps, 528, 4)
            each = -(-steps // split)
            assert split * each >= steps and (split - 1) * each < steps
            assert split == 1 or each >= 4


def test_what_a_binary_was_made_from_is_hashed() -> None:
    first = VARIANTS["w4a16_vector_g64_bf16"]
    assert aot.source_sha256(first) == aot.source_sha256(replace(first))
    others = [replace(first, stages=first.stages + 1), replace(first, module="w8a8"), replace(first, name="other")]
    assert len({aot.source_sha256(variant) for variant in [first, *others]}) == 4


def test_what_cannot_be_compiled_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = VARIANTS["w4a16_combine_bf16"]
    with pytest.raises(InputError, match="target: 'sm_91' is not known; did you mean 'sm_90'. Known: sm_80, sm_90, "):
        aot.compile_variant(variant, "sm_91")
    monkeypatch.setattr(aot, "triton_version", lambda: None)
    assert aot.unavailable() == "Triton is not installed: pip install 'lmpress[kernels]'"
    with pytest.raises(InputError, match="kernels: Triton is not installed"):
        aot.compile_variant(variant, "sm_90")
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert aot.unavailable() == "Triton compiles on Linux only, and this is Darwin"


@needs_triton
def test_a_program_that_could_only_trap_is_refused() -> None:
    """Where a tile wants more tensor memory than there is, Triton says nothing and leaves a trap for a program."""
    wide = VARIANTS["w4a16_wide_g128_bf16"]
    values = replace(wide, constants=wide.constants | {"JOINED": 1000, "BLOCK_M": 256, "BLOCK_N": 256})
    with pytest.raises(InputError, match=r"wants \d+ columns of tensor memory on sm_100, which has 512: Triton 3"):
        aot.compile_variant(values, "sm_100")


def test_blackwell_alone_joins_the_values_of_a_block() -> None:
    wide = VARIANTS["w4a16_wide_g128_bf16"]
    joined = {target: aot.constants_for(wide, target)["JOINED"] for target in aot.TARGETS}
    assert joined == {"sm_80": 0, "sm_90": 0, "sm_100": 1, "gfx942": 0}
    assert aot.constants_for(VARIANTS["w4a16_combine_bf16"], "sm_100") == {"BLOCK": 1024}


@needs_triton
def test_an_interpreter_does_not_compile() -> None:
    code = "from compress.kernels import aot; aot.compile_variant(aot.variants()[0], 'sm_90')"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "InputError: kernels: TRITON_INTERPRET is set" in done.stderr


def test_the_names_are_unique_and_the_binaries_for_a_format_are_found() -> None:
    assert len({variant.name for variant in aot.variants()}) == len(aot.variants())
    formats = {variant.format for variant in aot.variants()}
    assert formats == {"pack-quantized", "int-quantized", "int8-outlier", "sparse24", "kv-cache"}
