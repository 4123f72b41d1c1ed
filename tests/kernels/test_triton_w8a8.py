"""int8 weights times quantized activations in Triton: the reference's integers and exact sums, over odd shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.formats import int8_outlier
from compress.formats.grid import Quantized
from compress.formats.scheme import scheme_named
from compress.kernels import reference
from compress.kernels.triton import layout
from compress.kernels.triton.launch import Shape, int8_product
from tests.kernels.interpreter import interpreted

GENERATOR = torch.Generator().manual_seed(5)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# Tokens, rows, columns, multiprocessors.
SHAPES = {
    "one token": (1, 80, 192, 1),
    "tokens and columns past a tile": (17, 16, 208, 1),
    "tokens past two tiles, in parts": (33, 144, 1360, 8),
    "a few tokens, in parts": (3, 48, 2096, 8),
}


def integers(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=GENERATOR)


def scales(rows: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, generator=GENERATOR).mul(0.01).to(dtype)


def plain(x: Tensor, weight: Tensor, scale: Tensor, processors: int) -> dict[str, Tensor]:
    """All tensors after the W8A8 plan for x [M, K] times weight [N, K]; out in float32."""
    out = torch.full((x.shape[0], weight.shape[0]), torch.nan)
    plan = int8_product(Shape(x.shape[0], *weight.shape), "bf16", processors)
    return interpreted(plan, {"x": x, "weight": weight, "scale": scale, "out": out})


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_products_are_the_references_bit_for_bit(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    tokens, rows, columns, processors = shape
    x = torch.randn(tokens, columns, generator=GENERATOR).to(dtype)
    weight, scale = integers(rows, columns), scales(rows, dtype)
    got = plain(x, weight, scale, processors)
    quantized, step = reference.quantize_tokens(x, 127.5)
    assert torch.equal(got["integers"], quantized) and torch.equal(got["steps"], step[:, 0])
    want = reference.integer_matmul(quantized, weight).float() * step * scale.float()
    assert torch.equal(got["out"], want)


def test_the_plans_in_parts_have_parts() -> None:
    for name, (tokens, rows, columns, processors) in SHAPES.items():
        plan = int8_product(Shape(tokens, rows, columns), "bf16", processors)
        assert ("partial" in plan.buffers) == ("in parts" in name) == (len(plan.steps) == 3)


def test_ties_ends_and_zeros() -> None:
    x = torch.zeros(3, 16)
    x[0, :5] = torch.tensor([127.5, -127.5, 0.5, 1.5, -2.5])
    x[1, :3] = torch.tensor([-1.0, 1.0, 1 / 255])
    got = plain(x, integers(16, 16), scales(16, torch.float32), 1)
    assert got["integers"][0, :5].tolist() == [127, -128, 0, 2, -2]
    assert torch.equal(got["integers"], reference.quantize_tokens(x, 127.5)[0])
    assert got["steps"][2] == 1 and (got["out"][2] == 0).all()


@pytest.mark.parametrize("extreme", [127, -128])
def test_sums_are_exact_at_the_extremes(extreme: int) -> None:
    """Over more columns than float32 sums exactly; a weight of one sign, so that nothing cancels."""
    x = torch.full((2, 2048), float(extreme))
    weight = torch.full((16, 2048), -128, dtype=torch.int8)
    got = plain(x, weight, torch.ones(16), 8)
    quantized, step = reference.quantize_tokens(x, 127.5)
    assert got["partial"].sum(0).unique().tolist() == [int(quantized[0, 0]) * -128 * 2048]
    assert torch.equal(got["out"], (quantized.long() @ weight.long().T).float() * step)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_activations_that_are_not_finite_show(bad: float) -> None:
    x = torch.ones(3, 64)
    x[1, 7] = bad
    finite = plain(x, integers(16, 64), scales(16, torch.float32), 1)["out"].isfinite()
    assert finite[0].all() and not finite[1].any() and finite[2].all()


def outlier_weight(rows: int, columns: int, outliers: Tensor, dtype: torch.dtype) -> Quantized:
    """A weight with `outliers` in 16 bit, and zeros on the grid in their place."""
    q = integers(rows, columns)
    q[:, outliers.long()] = 0
    kept = torch.randn(rows, len(outliers), generator=GENERATOR).to(dtype)
    return Quantized(q, scales(rows, dtype)[:, None], outlier_columns=outliers, outlier_weight=kept)


def with_outliers(x: Tensor, weight: Quantized, processors: int) -> dict[str, Tensor]:
    """All tensors after the LLM.int8() plan for x [M, K]; out in float32."""
    assert weight.outlier_columns is not None and weight.outlier_weight is not None
    ordinary = torch.ones(x.shape[1], dtype=torch.int8)
    ordinary[weight.outlier_columns.long()] = 0
    tensors = {
        "x": x,
        "ordinary": ordinary,
        "outlier_columns": weight.outlier_columns,
        "weight": weight.q,
        "scale": weight.scale[:, 0],
        "outlier_weight": layout.outlier_tiles(weight.outlier_weight, 16),
        "counts": torch.tensor([5, 7]),
        "out": torch.full((x.shape[0], weight.q.shape[0]), torch.nan),
    }
    shape = Shape(x.shape[0], *weight.q.shape)
    return interpreted(int8_product(shape, NAMES[x.dtype], processors, len(weight.outlier_columns), 2.5), tensors)


COUNTS = [(name, 21, torch.bfloat16) for name in SHAPES] + [("one token", 21, torch.float16)]
COUNTS += [("tokens and columns past a tile", count, torch.bfloat16) for count in (0, 1, 16)]


@pytest.mark.parametrize(("name", "count", "dtype"), COUNTS, ids=[f"{n}, {c}, {NAMES[d]}" for n, c, d in COUNTS])
def test_outlier_columns(name: str, count: int, dtype: torch.dtype) -> None:
    """Large activations in those columns change no integer elsewhere, are counted nowhere, and weigh in 16 bit."""
    tokens, rows, columns, processors = SHAPES[name]
    outliers = torch.randperm(columns, generator=GENERATOR)[:count].sort().values.int()
    weight = outlier_weight(rows, columns, outliers, dtype)
    x = torch.randn(tokens, columns, generator=GENERATOR).to(dtype)
    x[:, outliers.long()] *= 64
    got = with_outliers(x, weight, processors)

    inside = x.index_fill(1, outliers.long(), 0)
    quantized, step = reference.quantize_tokens(inside, 127.0)
    assert torch.equal(got["steps"], step[:, 0])
    ordinary = torch.ones(columns, dtype=torch.bool).index_fill(0, outliers.long(), False)
    assert torch.equal(got["integers"][:, ordinary], quantized[:, ordinary])
    assert got["counts"].tolist() == [5 + int((inside.abs() >= 2.5).sum()), 7 + x.numel()]

    scheme = scheme_named("LLM_INT8")
    packed = int8_outlier.pack(weight, scheme.grid)
    want = reference.matmul(x.float(), reference.prepare(packed, scheme, torch.device("cpu")))
    noise = (got["out"].double() - want.double()).square().sum()
    assert 10 * torch.log10(want.double().square().sum() / noise) > 115


def test_padding_never_meets_what_lies_in_the_first_column() -> None:
    """Outlier tiles are padded: an infinity in column 0 must not turn zeros of the padding into NaN."""
    weight = outlier_weight(16, 64, torch.tensor([3], dtype=torch.int32), torch.bfloat16)
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    x[0, 0] = torch.inf
    finite = with_outliers(x, weight, 1)["out"].isfinite()
    assert not finite[0].any() and finite[1].all()
    assert with_outliers(x, weight, 1)["gathered"][0, 1:].eq(0).all()
