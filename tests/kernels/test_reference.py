"""The reference kernel against slow oracles: dequantized products, exact integer sums, outlier columns and misses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress.formats import format_named, sparse24
from compress.formats.grid import Grid, Quantized, dequantize
from compress.formats.scheme import FLOATS, Scheme, pruned, scheme_named
from compress.kernels import reference
from tests.kernels.pruned import random_pruned

GENERATOR = torch.Generator().manual_seed(0)
SCHEMES = {
    "W4A16 group 32": scheme_named("W4A16", 32),
    "W4A16 channel": scheme_named("W4A16", "channel"),
    "W4A16_ASYM": scheme_named("W4A16_ASYM", 32),
    "W8A16": scheme_named("W8A16", 32),
    "W8A8": scheme_named("W8A8"),
    "2:4 W4A16": pruned(scheme_named("W4A16", 32), sparse24.PATTERN),
    "2:4 W8A8": pruned(scheme_named("W8A8"), sparse24.PATTERN),
    "2:4 floats": pruned(FLOATS, sparse24.PATTERN),
}


def random_weight(rows: int, columns: int, grid: Grid) -> Quantized:
    def integers(*shape: int) -> Tensor:
        return torch.randint(grid.minimum, grid.maximum + 1, shape, dtype=torch.int8, generator=GENERATOR)

    groups = grid.groups(columns)
    scale = torch.randn(rows, groups, generator=GENERATOR).mul(0.01).to(torch.bfloat16)  # of either sign
    return Quantized(integers(rows, columns), scale, None if grid.symmetric else integers(rows, groups))


def weight_of(scheme: Scheme) -> Quantized:
    """A weight [40, 96] as `scheme` stores it."""
    if scheme.pattern is not None:
        return random_pruned(40, 96, scheme.grid, GENERATOR)
    return random_weight(40, 96, scheme.grid)


def prepared(weight: Quantized, scheme: Scheme, device: torch.device) -> reference.Prepared:
    packed = format_named(scheme.format).pack(weight, scheme.grid)
    return reference.prepare(packed, scheme, device)


def decibels(got: Tensor, want: Tensor) -> float:
    """Signal to noise ratio of `got`."""
    return float(10 * torch.log10(want.double().square().sum() / (got.double() - want.double()).square().sum()))


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
@pytest.mark.parametrize("chunk", [1 << 20, 1000], ids=["one chunk", "many chunks"])
def test_matmul(monkeypatch: pytest.MonkeyPatch, device: torch.device, scheme: Scheme, chunk: int) -> None:
    """x [3, 5, 96] times a packed [40, 96]: what float64 arithmetic makes of the dequantized weight."""
    monkeypatch.setattr(reference, "CHUNK", chunk)
    weight = weight_of(scheme)
    x = torch.randn(3, 5, 96, generator=GENERATOR)
    want = reference.round_activations(x, scheme).double() @ dequantize(weight).double().T
    got = reference.matmul(x.to(device), prepared(weight, scheme, device)).cpu()
    assert got.shape == (3, 5, 40) and got.dtype == torch.float32
    assert decibels(got, want) > 120


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_dequantized_rows_are_exact(scheme: Scheme) -> None:
    weight = weight_of(scheme)
    rows = reference._weight_rows(prepared(weight, scheme, torch.device("cpu")), slice(8, 24))
    assert torch.equal(rows, dequantize(weight)[8:24])


def test_one_token_is_the_dense_product() -> None:
    """Rows of a product do not depend on how many are computed at a time."""
    scheme = scheme_named("W4A16", 32)
    weight = random_weight(64, 96, scheme.grid)
    x = torch.randn(1, 96, generator=GENERATOR)
    for dtype in (torch.float32, torch.bfloat16):
        got = reference.matmul(x.to(dtype), prepared(weight, scheme, torch.device("cpu")))
        assert torch.equal(got, x.to(dtype) @ dequantize(weight).to(dtype).T)


def test_packed_weight_stays_packed() -> None:
    scheme = scheme_named("W4A16", 32)
    resident = prepared(random_weight(64, 96, scheme.grid), scheme, torch.device("cpu"))
    assert resident.weight.nbytes == 64 * 96 // 2


def test_quantize_tokens() -> None:
    x = torch.tensor([[0.0, 0.0], [127.0, -12.5], [-1.0, 0.5]])
    integers, step = reference.quantize_tokens(x)
    assert integers.tolist() == [[0, 0], [127, -12], [-127, 64]]
    assert step.flatten().tolist() == pytest.approx([1.0, 1.0, 1 / 127])
    # 127.5 levels, as compressed-tensors counts them: only the positive end is clamped.
    both = torch.tensor([[127.5, -64.5], [-127.5, 64.5]])
    assert reference.quantize_tokens(both, 127.5)[0].tolist() == [[127, -64], [-128, 64]]


def test_activations_that_are_not_finite_show() -> None:
    scheme = scheme_named("W8A8")
    weight = prepared(random_weight(16, 32, scheme.grid), scheme, torch.device("cpu"))
    x = torch.ones(3, 32)
    x[0, 3], x[1, 5] = torch.nan, torch.inf
    finite = reference.matmul(x, weight).isfinite()
    assert finite[2].all() and not finite[:2].any()


@pytest.mark.parametrize("extreme", [127, -128])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_integer_sums_are_exact(device: torch.device, rows: int, extreme: int) -> None:
    """At the largest possible magnitudes too, over more columns than float32 can sum exactly at once."""
    left = torch.randint(-128, 128, (rows, 3000), dtype=torch.int8, generator=GENERATOR)
    right = torch.randint(-128, 128, (24, 3000), dtype=torch.int8, generator=GENERATOR)
    left[0], right[0], right[1] = extreme, 127, -128
    want = left.long() @ right.long().T
    for product in (reference.integer_matmul, reference._float_matmul):
        assert torch.equal(product(left.to(device), right.to(device)).cpu().long(), want)


def outlier_weight(columns: list[int]) -> tuple[Quantized, Tensor]:
    """A weight [24, 64] with `columns` in 16 bit, and what it dequantizes to."""
    grid = scheme_named("LLM_INT8").grid
    weight = random_weight(24, 64, grid)
    kept = torch.tensor(columns, dtype=torch.int32)
    weight.q[:, kept.long()] = 0
    values = torch.randn(24, len(columns), generator=GENERATOR).to(torch.bfloat16)
    weight = replace(weight, outlier_columns=kept, outlier_weight=values)
    return weight, dequantize(weight)


@pytest.mark.parametrize("columns", [[5, 40], []], ids=["two columns", "none"])
def test_outlier_columns(device: torch.device, columns: list[int]) -> None:
    """Each output is an exact integer sum, scaled, plus the outlier columns' product (arXiv 2208.07339, equation 8)."""
    scheme = scheme_named("LLM_INT8")
    weight, dense = outlier_weight(columns)
    x = torch.randn(7, 64, generator=GENERATOR)
    x[:, columns] *= 50
    inside = x.double()
    inside[:, columns] = 0
    step = inside.abs().amax(1, keepdim=True) / 127
    want = ((inside / step).round() * step) @ dense.double().T + x[:, columns].double() @ dense[:, columns].double().T
    got = reference.matmul(x.to(device), prepared(weight, scheme, device)).cpu()
    assert decibels(got, want) > 120
    rule = reference.round_activations(x, scheme, weight.outlier_columns)
    assert decibels(rule @ dense.T, got) > 120


def test_outliers_cost_nothing_in_their_columns_and_much_elsewhere() -> None:
    scheme = scheme_named("LLM_INT8")
    weight, dense = outlier_weight([5, 40])
    resident = prepared(weight, scheme, torch.device("cpu"))
    x = torch.randn(50, 64, generator=GENERATOR)
    known, missed = x.clone(), x.clone()
    known[:, 5] *= 60
    missed[:, 6] *= 60
    harmless, harmful = ((reference.matmul(x, resident) - x @ dense.T).norm() for x in (known, missed))
    assert harmful > 8 * harmless


def test_missed_outliers_are_counted() -> None:
    scheme = scheme_named("LLM_INT8")
    resident = prepared(outlier_weight([5, 40])[0], scheme, torch.device("cpu"))
    x = torch.zeros(2, 3, 64)
    x[0, 0, 5] = 100.0  # in an outlier column
    x[0, 1, 7], x[1, 2, 8], x[1, 2, 9] = 6.0, -7.0, 5.9
    reference.matmul(x, resident)
    assert reference.outlier_counts(resident) == (2, 384)
    reference.matmul(x, resident)
    assert reference.outlier_counts(resident) == (4, 768)
    plain = scheme_named("W8A8")
    assert reference.outlier_counts(prepared(random_weight(8, 32, plain.grid), plain, torch.device("cpu"))) is None
