"""The GPU kernel without a GPU: layouts, plans and pointers through Triton's interpreter; every argument marshalled."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compress.errors import InputError
from compress.formats import format_named, sparse24
from compress.formats.grid import FLOAT_BITS, Quantized
from compress.formats.pattern import keep_largest
from compress.formats.scheme import FLOATS, Scheme, pruned, scheme_named
from compress.kernels import aot, build, cuda, driver, reference
from compress.kernels.cuda import Attention, CudaKernel, PagedCache
from compress.kernels.exported import Built
from compress.kernels.triton import launch
from tests.kernels import on_cpu
from tests.kernels.compiled import install
from tests.kernels.interpreter import interpreted

CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(0)
SCHEMES = {
    "W4A16 g64": scheme_named("W4A16", 64),
    "W4A16_ASYM g96": scheme_named("W4A16_ASYM", 96),
    "W4A16 channel": scheme_named("W4A16", "channel"),
    "W8A16 g128": scheme_named("W8A16"),
    "W8A8": scheme_named("W8A8"),
    "LLM_INT8": scheme_named("LLM_INT8"),
    **{
        f"{scheme.name} 2:4": pruned(scheme, sparse24.PATTERN)
        for scheme in (FLOATS, scheme_named("W8A8"), scheme_named("W4A16"))
    },
}


class Hopper:
    """An H100 that runs plans on CPU tensors: Triton's by its interpreter, those of CUDA C++ by on_cpu.py.

    `launched`: every step with the arguments that a driver would get.
    """

    def __init__(self) -> None:
        self.launched: list[tuple[str, tuple[int, int, int], tuple[Any, ...]]] = []
        self.loaded: list[tuple[str, str]] = []
        self.capability = (9, 0)

    def load(self, built: Built, device: torch.device) -> driver.Loaded:
        self.loaded.append((built.entry.name, built.entry.target))
        return driver.Loaded(built.entry, None, device)

    def run(
        self, plan: launch.Plan, kernels: Mapping[str, driver.Loaded], pointers: Mapping[str, Tensor | None]
    ) -> None:
        self._marshal(plan, kernels, pointers)
        if plan.steps[0].name.startswith("sparse24"):
            if on_cpu.unavailable() is not None:
                pytest.skip(str(on_cpu.unavailable()))
            on_cpu.run(plan, pointers)
            return
        given = {name: tensor for name, tensor in pointers.items() if tensor is not None}
        after = interpreted(plan, given)
        for name in ("out", "counts"):
            if name in given:
                given[name].copy_(after[name])

    def _marshal(
        self, plan: launch.Plan, kernels: Mapping[str, driver.Loaded], pointers: Mapping[str, Tensor | None]
    ) -> None:
        held = dict(pointers)
        for name, (kind, shape) in plan.buffers.items():
            held[name] = torch.empty(shape, dtype=cuda.BUFFER_TYPES[kind])
        for step in plan.steps:
            entry = kernels[step.name].entry
            values = cuda.arguments(entry.arguments, step, held)
            self.launched.append((step.name, step.grid, driver.marshal(entry, values)))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hopper:
    """The GPU, and a compiler for it."""
    compiler = install(monkeypatch, tmp_path / "cache")
    gpu = Hopper()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu.capability)
    properties = type("Properties", (), {"multi_processor_count": 8})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(driver, "load", gpu.load)
    monkeypatch.setattr(driver, "unavailable", compiler.unavailable)
    monkeypatch.setattr(cuda, "run", gpu.run)
    cuda._loaded.cache_clear()
    return gpu


def stored(
    scheme: Scheme, rows: int = 48, columns: int = 384, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """A random packed weight, by suffix."""
    grid = scheme.grid

    def integers(*shape: int) -> Tensor:
        return torch.randint(grid.minimum, grid.maximum + 1, shape, dtype=torch.int8, generator=GENERATOR)

    groups = grid.groups(columns)
    if scheme.pattern is not None:
        mask = keep_largest(torch.rand(rows, columns, generator=GENERATOR), scheme.pattern)
        floats = torch.randn(rows, columns, generator=GENERATOR).to(dtype)
        q = floats if grid.bits == FLOAT_BITS else integers(rows, columns)
        scale = torch.randn(rows, groups, generator=GENERATOR).mul(0.01).to(dtype)
        return sparse24.pack(Quantized(q.masked_fill(~mask, 0), scale, mask=mask), grid)
    scale = torch.randn(rows, groups, generator=GENERATOR).mul(0.01).to(dtype)
    weight = Quantized(integers(rows, columns), scale, None if grid.symmetric else integers(rows, groups))
    if scheme.threshold is not None:
        kept = torch.tensor([5, 40, 41, 300], dtype=torch.int32)
        weight.q[:, kept.long()] = 0
        values = torch.randn(rows, len(kept), generator=GENERATOR).to(dtype)
        weight = replace(weight, outlier_columns=kept, outlier_weight=values)
    return format_named(scheme.format).pack(weight, grid)


def decibels(got: Tensor, want: Tensor) -> float:
    """Signal to noise ratio of `got`."""
    return float(10 * torch.log10(want.double().square().sum() / (got.double() - want.double()).square().sum()))


@pytest.mark.parametrize("tokens", [1, 7, 33])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_products_equal_the_reference(hopper: Hopper, scheme: Scheme, tokens: int) -> None:
    """But for weights and outputs in bfloat16, to which the interpreter cuts down: that leaves some 44 dB."""
    kernel, tensors = CudaKernel(), stored(scheme)
    prepared = kernel.prepare(tensors, scheme, CPU)
    x = torch.randn(tokens, 384, generator=GENERATOR).to(torch.bfloat16)
    got = kernel.matmul(x, prepared)
    want = reference.matmul(x.float(), reference.prepare(tensors, scheme, CPU))
    assert got.shape == (tokens, 48) and got.dtype == torch.bfloat16
    assert decibels(got, want) > 42


def test_shapes_of_any_rank_and_no_tokens(hopper: Hopper) -> None:
    scheme = SCHEMES["W4A16 g64"]
    kernel, tensors = CudaKernel(), stored(scheme)
    prepared = kernel.prepare(tensors, scheme, CPU)
    x = torch.randn(2, 384, 3, generator=GENERATOR).to(torch.bfloat16).transpose(1, 2)  # not contiguous
    got = kernel.matmul(x, prepared)
    assert got.shape == (2, 3, 48)
    assert torch.equal(got[1], kernel.matmul(x[1].contiguous(), prepared))
    assert kernel.matmul(x[:0], prepared).shape == (0, 3, 48)


def test_the_number_of_tokens_decides_the_variant(hopper: Hopper) -> None:
    scheme = SCHEMES["W4A16 g64"]
    kernel = CudaKernel()
    prepared = kernel.prepare(stored(scheme), scheme, CPU)
    kinds = {}
    for tokens in (1, 2, 16, 17, 64):
        first = prepared.plan(tokens).steps[0]
        kinds[tokens] = first.name
    assert kinds == {
        1: "w4a16_vector_g64_bf16",
        2: "w4a16_narrow_g64_bf16",
        16: "w4a16_narrow_g64_bf16",
        17: "w4a16_wide_g64_bf16",
        64: "w4a16_wide_g64_bf16",
    }
    assert set(kinds.values()) < prepared.kernels.keys()
    assert all(step.name in prepared.kernels for tokens in kinds for step in prepared.plan(tokens).steps)


def test_kernels_are_loaded_once_per_process(hopper: Hopper) -> None:
    scheme = SCHEMES["W8A8"]
    for _ in range(2):
        CudaKernel().prepare(stored(scheme), scheme, CPU)
    assert sorted(hopper.loaded) == sorted((name, "sm_90") for name, _ in set(hopper.loaded))
    assert {name for name, _ in hopper.loaded} == {
        f"w8a8_{kind}_bf16" for kind in ("quantize", "narrow", "wide", "combine")
    }


def test_missed_outliers_are_counted(hopper: Hopper) -> None:
    scheme = SCHEMES["LLM_INT8"]
    kernel, tensors = CudaKernel(), stored(scheme)
    prepared, wanted = kernel.prepare(tensors, scheme, CPU), reference.prepare(tensors, scheme, CPU)
    x = torch.randn(3, 384, generator=GENERATOR).to(torch.bfloat16)
    x[0, 5], x[1, 7], x[2, 9] = 100.0, 8.0, -9.0
    for _ in range(2):
        kernel.matmul(x, prepared)
        reference.matmul(x, wanted)
    assert kernel.outlier_counts(prepared) == reference.outlier_counts(wanted) == (4, 2 * 3 * 384)
    plain = SCHEMES["W8A8"]
    assert kernel.outlier_counts(kernel.prepare(stored(plain), plain, CPU)) is None


def test_activations_of_another_type_are_refused_with_the_mend(hopper: Hopper) -> None:
    scheme, gpu = SCHEMES["W4A16 g64"], torch.device("cuda")
    full = CudaKernel(torch.float32)
    assert full.refuses(scheme, gpu) == (
        "multiplies 16-bit activations, not torch.float32: load the model with --dtype bfloat16"
    )
    with pytest.raises(InputError, match="scales are torch.bfloat16 and activations torch.float16: .*--dtype bfloat16"):
        CudaKernel(torch.float16).prepare(stored(scheme), scheme, CPU)
    prepared = CudaKernel().prepare(stored(scheme), scheme, CPU)
    with pytest.raises(ValueError, match="activations are torch.float32, and the kernels were loaded for torch.bfl"):
        CudaKernel().matmul(torch.randn(1, 384), prepared)


def test_float16_checkpoints_have_kernels_of_their_own(hopper: Hopper) -> None:
    scheme = SCHEMES["W8A8"]
    kernel, tensors = CudaKernel(torch.float16), stored(scheme, dtype=torch.float16)
    prepared = kernel.prepare(tensors, scheme, CPU)
    x = torch.randn(3, 384, generator=GENERATOR).to(torch.float16)
    got = kernel.matmul(x, prepared)
    assert got.dtype == torch.float16 and {name[-4:] for name in prepared.kernels} == {"fp16"}
    assert decibels(got, reference.matmul(x.float(), reference.prepare(tensors, scheme, CPU))) > 42


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": torch.float32}, "scales are torch.float32, not 16 bits wide"),
        ({"rows": 24}, "24 x 384 is not a multiple of 16 both ways"),
        ({"columns": 264, "scheme": "W16A16 2:4"}, "a 2:4 weight of 48 x 264 has no multiple of 16 columns"),
    ],
)
def test_weights_that_no_binary_takes_are_refused(hopper: Hopper, changes: dict[str, Any], words: str) -> None:
    scheme = SCHEMES[changes.pop("scheme", "W4A16 g64")]
    with pytest.raises(InputError, match=words):
        CudaKernel().prepare(stored(scheme, **changes), scheme, CPU)


def test_devices_it_does_not_run_on(hopper: Hopper, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, scheme, gpu = CudaKernel(), SCHEMES["W4A16 g64"], torch.device("cuda")
    assert kernel.refuses(scheme, CPU) == "runs on NVIDIA GPUs alone"
    assert kernel.refuses(scheme, gpu) is None
    assert "groups of 32 columns" in str(kernel.refuses(scheme_named("W4A16", 16), gpu))
    assert kernel.refuses(SCHEMES["W4A16 2:4"], gpu) is None
    full = CudaKernel(torch.float32).refuses(SCHEMES["W16A16 2:4"], gpu)
    assert full == "multiplies 16-bit activations, not torch.float32: load the model with --dtype bfloat16"
    for capability, target in (((8, 0), "sm_80"), ((8, 9), "sm_80"), ((9, 0), "sm_90"), ((10, 0), "sm_100")):
        assert cuda.target_of(capability) == target
        hopper.capability = capability
        assert kernel.refuses(scheme, gpu) is None
    for major, minor in ((7, 5), (10, 3), (12, 0)):
        hopper.capability = (major, minor)
        assert kernel.refuses(scheme, gpu) == f"has no binaries for compute capability {major}.{minor}"
    monkeypatch.setattr(driver, "unavailable", lambda: "cuda-core is not installed: pip install it")
    assert kernel.refuses(scheme, gpu) == "cuda-core is not installed: pip install it"
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "launches no AMD kernels" in str(kernel.refuses(scheme, gpu))


@pytest.mark.parametrize("int8", [False, True], ids=["16 bit", "int8"])
def test_attention_over_pages(hopper: Hopper, int8: bool) -> None:
    """Two sequences of unequal length, pages out of order: what torch makes of the same keys and values."""
    page = launch.TILES["attention_attend"]["PAGE"]
    heads = launch.Heads(query=4, key=2, width=64, int8=int8)
    lengths = torch.tensor([page + 5, 3], dtype=torch.int32)
    table = torch.tensor([[2, 0], [1, 0]], dtype=torch.int32)
    shape = (3, heads.key, page, heads.width)
    query = torch.randn(2, heads.query, heads.width, generator=GENERATOR).to(torch.bfloat16)
    keys, values = (torch.randn(shape, generator=GENERATOR).to(torch.bfloat16) for _ in range(2))
    cache = PagedCache(keys, values, table, lengths)
    if int8:
        steps = [x.float().abs().amax(-1) / 127 for x in (keys, values)]
        rounded = [
            (x.float() / s[..., None]).round().to(torch.int8) for x, s in zip((keys, values), steps, strict=True)
        ]
        cache = PagedCache(*rounded, table, lengths, *steps)
        keys, values = (q.float() * step[..., None] for q, step in zip(rounded, steps, strict=True))
    got = Attention(heads, launch.Scores(scale=0.125))(query, cache)
    for sequence in range(2):
        run, held = table[sequence].tolist(), int(lengths[sequence])
        seen = [torch.cat([x[number] for number in run], dim=1)[:, :held].float() for x in (keys, values)]
        seen = [x.repeat_interleave(2, dim=0) for x in seen]
        scores = (query[sequence].float()[:, None] @ seen[0].transpose(1, 2)) * 0.125
        want = (scores.softmax(-1) @ seen[1])[:, 0]
        assert decibels(got[sequence], want) > 40
    with pytest.raises(InputError, match="has no attention for torch.float32"):
        Attention(heads, launch.Scores(scale=0.125))(query.float(), cache)


def entry(name: str = "w4a16_vector_g64_bf16") -> Any:
    return build.device_kernel(next(one for one in aot.variants() if one.name == name), "sm_90").entry


def values() -> dict[str, Any]:
    """Right arguments of the vector kernel."""
    numbers = {"rows": 16, "columns": 128, "blocks": 1, "groups": 2, "shift": 6, "asymmetric": 0, "split": 1}
    x, out, scales = (torch.zeros(128, dtype=torch.bfloat16) for _ in range(3))
    words = torch.zeros(16, 16, dtype=torch.int32)
    return numbers | {"x": x, "words": words, "scales": scales, "zeros": None, "out": out, "partial": None}


def test_marshalling(hopper: Hopper) -> None:
    given = values()
    arguments = dict(zip([name for name, _ in entry().arguments], driver.marshal(entry(), given), strict=True))
    assert arguments["x"] == given["x"].data_ptr() and arguments["zeros"] == 0 and arguments["global_scratch"] == 0
    assert arguments["rows"] == 16 and type(arguments["rows"]) is np.int32
    attend = entry("attention_attend_plain_d64_bf16")
    kinds = dict(attend.arguments)
    assert kinds["scale"] == "fp32" and type(driver._argument(attend, "scale", "fp32", 0.125)) is np.float32


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.zeros(128)}, "x is torch.bfloat16, not torch.float32"),
        ({"x": torch.zeros(8, 16, dtype=torch.bfloat16).T}, r"x is not contiguous: its strides are \(1, 16\)"),
        ({"x": torch.zeros(136, dtype=torch.bfloat16)[1:129]}, "x does not begin at a multiple of 16 bytes"),
        ({"x": 5}, "x is a tensor, not int"),
        ({"rows": torch.zeros(1)}, "rows is a number, not Tensor"),
        ({"rows": None}, "rows is a number, not NoneType"),
        ({"rows": 1 << 31}, "rows is 2147483648, which i32 cannot hold"),
        ({"rows": 1.5}, "rows is 1.5, which is no whole number"),
        ({"more": 1}, "takes x, words, .*, not .*more"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(hopper: Hopper, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        driver.marshal(entry(), values() | changes)
    short = values()
    del short["zeros"]
    with pytest.raises(ValueError, match="takes x, words"):
        driver.marshal(entry(), short)


def test_cuda_core_takes_what_is_marshalled(hopper: Hopper) -> None:
    """Its own handler lays the arguments out as the driver reads them: addresses of values of the right widths."""
    handler = pytest.importorskip("cuda.core._kernel_arg_handler")
    given = values()
    marshalled = driver.marshal(entry(), given)
    holder = handler.ParamHolder(marshalled)
    places = (ctypes.c_void_p * len(marshalled)).from_address(holder.ptr)
    for (name, kind), place in zip(entry().arguments, places, strict=True):
        wide = kind.startswith("*")
        read = (ctypes.c_uint64 if wide else ctypes.c_int32).from_address(place).value
        held = given.get(name)
        assert read == (held.data_ptr() if isinstance(held, Tensor) else held or 0), name


def test_steps_without_an_argument_are_a_bug(hopper: Hopper) -> None:
    step = launch.Step("w4a16_vector_g64_bf16", (1, 1, 1), {})
    with pytest.raises(ValueError, match="w4a16_vector_g64_bf16 takes x, and its plan gives none"):
        cuda.arguments(entry().arguments, step, {})


def test_launching_needs_cuda_core(monkeypatch: pytest.MonkeyPatch) -> None:
    driver._importable.cache_clear()
    monkeypatch.setattr(driver, "find_spec", lambda module: None)
    assert driver.unavailable() == "cuda-core is not installed: pip install 'lmpress[gpu]'"
    driver._importable.cache_clear()
