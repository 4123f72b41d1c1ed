"""2:4 weights on the CPU kernel: products, extremes, the layout's bytes, and results that nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress.formats import format_named, sparse24
from compress.formats.grid import Quantized, dequantize
from compress.formats.scheme import FLOATS, Scheme, pruned, scheme_named
from compress.kernels import reference_int8
from compress.kernels.cpu import build
from compress.kernels.cpu.kernel import GROUP_LEVELS, CpuKernel, Prepared, activation_group
from compress.kernels.cpu.layout import sparse_panels
from compress.kernels.cpu.library import Engine
from compress.kernels.reference import LEVELS, quantize_tokens
from tests.kernels.pruned import prune, random_pruned

CPU = torch.device("cpu")
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 70, 131)
DENSE = {
    "W4A16 g32": scheme_named("W4A16", 32),
    "W4A16 g64": scheme_named("W4A16", 64),
    "W4A16 g128": scheme_named("W4A16", 128),
    "W4A16 channel": scheme_named("W4A16", "channel"),
    "W8A16 g64": scheme_named("W8A16", 64),
    "W8A16 channel": scheme_named("W8A16", "channel"),
    "W8A8": scheme_named("W8A8"),
}
SCHEMES = {name: pruned(scheme, sparse24.PATTERN) for name, scheme in DENSE.items()}
# Neither side a multiple of a panel's, with one activation step per row.
WHOLE_ROWS = [name for name, scheme in SCHEMES.items() if scheme.grid.group_size is None]


def prepare(kernel: CpuKernel, weight: Quantized, scheme: Scheme) -> Prepared:
    return kernel.prepare(format_named(scheme.format).pack(weight, scheme.grid), scheme, CPU)


def prepare_random(kernel: CpuKernel, scheme: Scheme, rows: int, columns: int) -> Prepared:
    return prepare(kernel, random_pruned(rows, columns, scheme.grid, torch.Generator().manual_seed(0)), scheme)


def product(x: Tensor, weight: Quantized, scheme: Scheme) -> Tensor:
    """The product of the same integers in float64."""
    levels = GROUP_LEVELS if scheme.activation_bits is None else LEVELS[scheme.format]
    integers, step = quantize_tokens(x.reshape(-1, activation_group(scheme, x.shape[-1])), levels)
    return (integers.double() * step.double()).view(x.shape) @ dequantize(weight).double().T


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("name", SCHEMES)
def test_products(kernel: CpuKernel, name: str) -> None:
    scheme, generator = SCHEMES[name], torch.Generator().manual_seed(0)
    for rows, columns in ((16, 128), (40, 384), (201, 1152)):
        weight = random_pruned(rows, columns, scheme.grid, generator)
        prepared = prepare(kernel, weight, scheme)
        for count in ROWS:
            x = torch.randn(count, columns, generator=generator)
            assert error(kernel.matmul(x, prepared), product(x, weight, scheme)) < 1e-6, (rows, columns, count)


@pytest.mark.parametrize("group", [96, 160, 192])
@pytest.mark.parametrize("name", ["W4A16", "W8A16"])
def test_groups_that_are_no_power_of_two(kernel: CpuKernel, name: str, group: int) -> None:
    scheme, generator = pruned(scheme_named(name, group), sparse24.PATTERN), torch.Generator().manual_seed(7)
    weight = random_pruned(40, 3 * group, scheme.grid, generator)
    prepared = prepare(kernel, weight, scheme)
    for count in ROWS:
        x = torch.randn(count, 3 * group, generator=generator)
        assert error(kernel.matmul(x, prepared), product(x, weight, scheme)) < 1e-6


@pytest.mark.parametrize("name", WHOLE_ROWS)
def test_columns_of_any_count_by_fours(kernel: CpuKernel, name: str) -> None:
    scheme, generator = SCHEMES[name], torch.Generator().manual_seed(1)
    for rows, columns in ((1, 4), (3, 36), (37, 132), (100, 388)):
        weight = random_pruned(rows, columns, scheme.grid, generator)
        prepared = prepare(kernel, weight, scheme)
        for count in ROWS:
            x = torch.randn(count, columns, generator=generator)
            want = product(x, weight, scheme)
            assert torch.allclose(kernel.matmul(x, prepared).double(), want, rtol=1e-6, atol=1e-6), (rows, columns)


@pytest.mark.parametrize("activation", [-1.0, 1.0])
@pytest.mark.parametrize("name", SCHEMES)
def test_extremes_are_summed_exactly(kernel: CpuKernel, name: str, activation: float) -> None:
    """The largest magnitudes on both sides, in every row and column; and kept values that are all zero."""
    scheme, generator = SCHEMES[name], torch.Generator().manual_seed(2)
    x = torch.full((20, 1024), activation)
    for value in (scheme.grid.minimum, scheme.grid.maximum, 0):
        weight = random_pruned(33, 1024, scheme.grid, generator)
        assert weight.mask is not None
        q = weight.mask * torch.tensor(value, dtype=torch.int8)
        weight = replace(weight, q=q, scale=torch.ones_like(weight.scale))
        for count in (1, 3, 8, 20):
            got = kernel.matmul(x[:count], prepare(kernel, weight, scheme))
            assert torch.equal(got, torch.full_like(got, got[0, 0].item()))
            assert got[0, 0].item() == pytest.approx(product(x, weight, scheme)[0, 0].item(), rel=1e-6)


@pytest.mark.parametrize("name", SCHEMES)
def test_neither_rows_nor_variants_nor_threads_change_a_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, generator = SCHEMES[name], torch.Generator().manual_seed(3)
    weight, x = random_pruned(90, 384, scheme.grid, generator), torch.randn(70, 384, generator=generator)
    results = []
    for variant in build.supported():
        monkeypatch.setenv("LMPRESS_CPU_VARIANT", variant)
        for threads in (1, 2):
            kernel = CpuKernel(Engine(threads))
            prepared = prepare(kernel, weight, scheme)
            results += [torch.cat([kernel.matmul(part, prepared) for part in x.split(size)]) for size in (70, 17, 3, 1)]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_twin_in_torch_agrees(kernel: CpuKernel, name: str) -> None:
    scheme, generator = SCHEMES[name], torch.Generator().manual_seed(4)
    weight, x = random_pruned(40, 384, scheme.grid, generator), torch.randn(2, 5, 384, generator=generator)
    tensors = format_named(scheme.format).pack(weight, scheme.grid)
    want = reference_int8.matmul(x, reference_int8.prepare(tensors, scheme, CPU))
    assert error(kernel.matmul(x, kernel.prepare(tensors, scheme, CPU)), want) < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_not_finite_shows(kernel: CpuKernel, name: str, bad: float) -> None:
    """Where its column is pruned, too: a step that is not finite is the whole group's."""
    prepared, x = prepare_random(kernel, SCHEMES[name], 16, 256), torch.ones(3, 256)
    x[1, 70] = bad
    assert kernel.matmul(x, prepared).isfinite().all(dim=1).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_floats_become_dense_weights(kernel: CpuKernel, dtype: torch.dtype) -> None:
    scheme, generator = pruned(FLOATS, sparse24.PATTERN), torch.Generator().manual_seed(5)
    values = torch.randn(40, 76, generator=generator).to(dtype)
    weight = prune(Quantized(values, torch.ones(40, 1)), generator)
    x = torch.randn(9, 76, generator=generator)
    want = kernel.matmul(x, kernel.prepare_dense(weight.q))
    assert torch.equal(kernel.matmul(x, prepare(kernel, weight, scheme)), want)


@pytest.mark.parametrize("name", ["W4A16 g128", "W8A8"])
def test_bytes_that_are_read(kernel: CpuKernel, name: str) -> None:
    """3 bits per weight and 5, and the scales: nothing is spent on what is pruned."""
    scheme = SCHEMES[name]
    tensors = prepare_random(kernel, scheme, 64, 512).tensors
    bits = {4: 3, 8: 5}[scheme.grid.bits]
    assert {name: tensor.nbytes for name, tensor in tensors.items()} == {
        "weight": 64 * 512 * bits // 8,
        "scale": 64 * scheme.grid.groups(512) * 2,
    }


@pytest.mark.parametrize("bits", [4, 8])
def test_layout(bits: int) -> None:
    """The weight read back from its panels, value by value, as weights.h says."""
    grid = SCHEMES["W4A16 channel" if bits == 4 else "W8A8"].grid
    weight = random_pruned(21, 44, grid, torch.Generator().manual_seed(6))
    assert weight.mask is not None
    panels = sparse_panels(weight.q, weight.mask, bits)
    assert panels.shape == (2, 2, 1 + bits // 2, 16, 4) and panels.dtype == torch.uint8
    found = torch.zeros_like(weight.q)
    for row in range(21):
        for column in range(0, 44, 4):
            block = panels[row // 16, column // 32, :, row % 16]
            unit, first = column % 32 // 8, column % 8 // 4 * 2
            for value in (first, first + 1):
                position = int(block[0, value]) >> 2 * unit & 3
                byte = int(block[1 + unit, value]) if bits == 8 else int(block[1 + unit // 2, value]) >> unit % 2 * 4
                number = byte & (1 << bits) - 1
                assert weight.mask[row, column + position]
                found[row, column + position] = number - (number >> bits - 1 << bits)
    assert torch.equal(found, weight.q)


def test_what_it_refuses(kernel: CpuKernel) -> None:
    assert kernel.refuses(SCHEMES["W4A16 g32"], CPU) is None
    assert kernel.refuses(pruned(FLOATS, sparse24.PATTERN), CPU) is None
    narrow = pruned(scheme_named("W4A16", 16), sparse24.PATTERN)
    assert kernel.refuses(narrow, CPU) == "its groups are multiples of 32 columns, not 16"
