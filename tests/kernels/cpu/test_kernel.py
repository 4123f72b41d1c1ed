"""The CPU kernel against float64 products of the same integers: every scheme and variant, over odd shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.formats import format_named
from compress.formats.grid import Quantized, dequantize
from compress.formats.scheme import Scheme, scheme_named
from compress.kernels.cpu.kernel import CpuKernel, Prepared, activation_group
from compress.kernels.cpu.layout import narrowest
from compress.kernels.reference import LEVELS, quantize_tokens

CPU = torch.device("cpu")
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 70, 131)
SCHEMES = {
    "W4A16 g32": scheme_named("W4A16", 32),
    "W4A16 g64": scheme_named("W4A16", 64),
    "W4A16 g128": scheme_named("W4A16", 128),
    "W4A16 channel": scheme_named("W4A16", "channel"),
    "W4A16_ASYM g64": scheme_named("W4A16_ASYM", 64),
    "W8A16 g64": scheme_named("W8A16", 64),
    "W8A16 channel": scheme_named("W8A16", "channel"),
    "W8A8": scheme_named("W8A8"),
    "LLM_INT8": scheme_named("LLM_INT8"),
}


def random_weight(scheme: Scheme, rows: int, columns: int, generator: torch.Generator) -> Quantized:
    """Integers over the whole grid, scales of both signs, and outlier columns where the scheme has them."""
    grid = scheme.grid
    q = torch.randint(grid.minimum, grid.maximum + 1, (rows, columns), generator=generator).to(torch.int8)
    groups = grid.groups(columns)
    scale = (torch.randn(rows, groups, generator=generator) * 0.01).to(torch.bfloat16)
    if scheme.name == "LLM_INT8":
        kept = torch.tensor([3, 17, columns - 1], dtype=torch.int32)
        q[:, kept.long()] = 0
        return Quantized(q, scale, None, kept, torch.randn(rows, 3, generator=generator).to(torch.bfloat16))
    zero = torch.randint(grid.minimum, grid.maximum + 1, (rows, groups), generator=generator).to(torch.int8)
    return Quantized(q, scale, None if grid.symmetric else zero)


def rounded(x: Tensor, scheme: Scheme, outliers: Tensor | None) -> Tensor:
    """What the kernel makes of x before it multiplies, float64."""
    if scheme.activation_bits is None:
        group = activation_group(scheme, x.shape[-1])
        integers, step = quantize_tokens(x.reshape(-1, group), 127.0)
        return (integers.double() * step.double()).view(x.shape)
    inside = x.clone()
    if outliers is not None:
        inside[:, outliers.long()] = 0
    integers, step = quantize_tokens(inside, LEVELS[scheme.format])
    result = integers.double() * step.double()
    if outliers is not None:
        result[:, outliers.long()] = x[:, outliers.long()].double()
    return result


@pytest.mark.parametrize("name", SCHEMES)
def test_products(kernel: CpuKernel, name: str) -> None:
    scheme, generator = SCHEMES[name], torch.Generator().manual_seed(0)
    for rows, columns in ((16, 128), (40, 384), (200, 1152)):
        weight = random_weight(scheme, rows, columns, generator)
        prepared = kernel.prepare(format_named(scheme.format).pack(weight, scheme.grid), scheme, CPU)
        for count in ROWS:
            x = torch.randn(count, columns, generator=generator)
            want = rounded(x, scheme, weight.outlier_columns) @ dequantize(weight).double().T
            got = kernel.matmul(x, prepared)
            assert ((got - want).norm() / want.norm()).item() < 1e-6, (rows, columns, count)


@pytest.mark.parametrize("name", ["W8A8", "LLM_INT8"])
def test_rows_of_any_length(kernel: CpuKernel, name: str) -> None:
    """Neither side a multiple of anything, with the largest magnitudes that int8 has on both sides."""
    scheme, generator = SCHEMES[name], torch.Generator().manual_seed(1)
    for rows, columns in ((1, 19), (37, 387)):
        weight = random_weight(scheme, rows, columns, generator)
        weight.q[:, 0] = -128
        prepared = kernel.prepare(format_named(scheme.format).pack(weight, scheme.grid), scheme, CPU)
        for count in ROWS:
            x = torch.randn(count, columns, generator=generator).sign() * 3
            want = rounded(x, scheme, weight.outlier_columns) @ dequantize(weight).double().T
            assert ((kernel.matmul(x, prepared) - want).norm() / want.norm()).item() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense(kernel: CpuKernel, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((1, 7), (100, 73), (160, 576)):
        weight = torch.randn(rows, columns, generator=generator).to(dtype).float()
        assert narrowest(weight).dtype == dtype
        prepared = kernel.prepare_dense(weight)
        for count in ROWS:
            x = torch.randn(count, columns, generator=generator)
            want = x.double() @ weight.double().T
            assert ((kernel.matmul(x, prepared) - want).norm() / want.norm()).item() < 1e-6, (rows, columns, count)
        ids = torch.randint(0, rows, (5,), generator=generator)
        assert torch.equal(kernel.engine.embed(prepared.layout, ids), weight[ids])


def test_activations_are_rounded_as_in_the_reference(kernel: CpuKernel) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(11, 256, generator=generator) * 4
    x[3] = 0
    for name in ("W4A16 g64", "W8A8"):
        scheme = SCHEMES[name]
        prepared = prepare_random(kernel, scheme, 16, 256)
        integers, steps = kernel.engine.quantize(prepared.layout, x)
        levels = 127.0 if scheme.activation_bits is None else 127.5
        want, step = quantize_tokens(x.view(-1, prepared.layout.group), levels)
        assert torch.equal(integers, want.view(11, 256)) and torch.equal(steps, step.view(11, -1))


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30], ids=["usual", "tiny", "huge"])
def test_activations_are_rounded_as_by_a_division(kernel: CpuKernel, size: float) -> None:
    """Numbers beside the ties between two integers, where the last bit of the quotient decides."""
    generator = torch.Generator().manual_seed(0)
    step = (torch.rand(256, 1, generator=generator, dtype=torch.float64) + 0.5) * size
    ties = torch.randint(-127, 127, (256, 4096), generator=generator) + 0.5
    x = (ties * step).float()
    x = torch.stack([x, x.nextafter(torch.tensor(torch.inf)), x.nextafter(-torch.tensor(torch.inf))], dim=-1)
    x = x.view(256, -1)[:, :8192].contiguous()
    x[:, ::64] = (127.0 * step).float()  # the largest of each group
    prepared = prepare_random(kernel, SCHEMES["W4A16 g64"], 16, 8192)
    integers, steps = kernel.engine.quantize(prepared.layout, x)
    want, wanted_step = quantize_tokens(x.view(-1, 64), 127.0)
    assert torch.equal(steps, wanted_step.view(256, -1)) and torch.equal(integers, want.view(256, -1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_not_finite_shows(kernel: CpuKernel, name: str, bad: float) -> None:
    prepared = prepare_random(kernel, SCHEMES[name], 16, 256)
    x = torch.ones(3, 256)
    x[1, 70] = bad
    finite = kernel.matmul(x, prepared).isfinite().all(dim=1)
    assert finite.tolist() == [True, False, True]


def test_misses_are_counted(kernel: CpuKernel) -> None:
    prepared = prepare_random(kernel, SCHEMES["LLM_INT8"], 16, 64)
    x = torch.zeros(7, 64)
    x[:, 3] = 100  # an outlier column
    x[2, 5], x[4, 6], x[4, 7] = 6.0, -7.0, 5.9
    kernel.matmul(x, prepared)
    kernel.matmul(x[4:5], prepared)
    assert kernel.outlier_counts(prepared) == (3, 8 * 64)
    assert kernel.outlier_counts(prepare_random(kernel, SCHEMES["W8A8"], 16, 64)) is None


def test_norm(kernel: CpuKernel) -> None:
    x, weight = torch.randn(5, 577), torch.randn(577)
    want = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight
    assert torch.allclose(kernel.engine.norm(x, weight, 1e-5), want, atol=1e-5)


def test_reading_reads_everything(kernel: CpuKernel) -> None:
    assert kernel.engine.read(torch.ones(1 << 18)) == 1 << 18


def test_what_it_refuses(kernel: CpuKernel) -> None:
    assert kernel.refuses(SCHEMES["W4A16 g32"], CPU) is None
    assert kernel.refuses(SCHEMES["W4A16 g32"], torch.device("cuda")) == "runs on the CPU alone"
    assert kernel.refuses(scheme_named("W4A16", 12), CPU) == "its groups are multiples of 8 columns, not 12"


def prepare_random(kernel: CpuKernel, scheme: Scheme, rows: int, columns: int) -> Prepared:
    weight = random_weight(scheme, rows, columns, torch.Generator().manual_seed(0))
    return kernel.prepare(format_named(scheme.format).pack(weight, scheme.grid), scheme, CPU)
