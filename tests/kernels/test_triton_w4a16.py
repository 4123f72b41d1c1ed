"""Grouped int4 and int8 weights in Triton: layouts are exact, products equal the reference over odd shapes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from compress.errors import InputError
from compress.formats import pack_quantized
from compress.formats.grid import Grid, Quantized, dequantize
from compress.kernels.triton import layout
from compress.kernels.triton.launch import Packing, Shape, packed_product, product_refuses
from tests.kernels.interpreter import interpreted

GENERATOR = torch.Generator().manual_seed(3)


@dataclass(frozen=True)
class Case:
    """A weight's grid and shape, and the device: more multiprocessors make more parts, and sm_100 joins values."""

    grid: Grid
    rows: int
    columns: int
    processors: int = 1
    target: str = "sm_90"


CASES = {
    "group 32": Case(Grid(4, True, 32), 16, 416),
    "group 64, asymmetric": Case(Grid(4, False, 64), 80, 192),
    "group 96, asymmetric": Case(Grid(4, False, 96), 16, 480),
    "group 128, in parts": Case(Grid(4, True, 128), 16, 1664, processors=8),
    "group 256": Case(Grid(4, True, 256), 144, 256),
    "row-wise, asymmetric, in parts": Case(Grid(4, False, None), 16, 1360, processors=8),
    "int8 group 64, asymmetric": Case(Grid(8, False, 64), 80, 192),
    "int8 group 128, in parts": Case(Grid(8, True, 128), 16, 1152, processors=8),
    "int8 row-wise": Case(Grid(8, True, None), 16, 208),
    "Blackwell, group 32": Case(Grid(4, True, 32), 80, 416, target="sm_100"),
    "Blackwell, group 64, asymmetric": Case(Grid(4, False, 64), 16, 192, target="sm_100"),
    "Blackwell, row-wise, in parts": Case(Grid(4, True, None), 16, 1360, 8, "sm_100"),
    "Blackwell, int8, asymmetric": Case(Grid(8, False, 128), 48, 384, target="sm_100"),
}


def random_weight(case: Case) -> Quantized:
    """Integers over the whole grid, and scales of either sign as auto-round writes them."""
    grid, rows, groups = case.grid, case.rows, case.grid.groups(case.columns)

    def integers(*shape: int) -> Tensor:
        return torch.randint(grid.minimum, grid.maximum + 1, shape, dtype=torch.int8, generator=GENERATOR)

    scale = torch.randn(rows, groups, generator=GENERATOR).mul(0.01).to(torch.bfloat16)
    return Quantized(integers(rows, case.columns), scale, None if grid.symmetric else integers(rows, groups))


def product(case: Case, weight: Quantized, x: Tensor, out: torch.dtype) -> Tensor:
    """x [M, K] times `weight`: [M, N] as `out`."""
    return run(case, weight, x, out)["out"]


def run(case: Case, weight: Quantized, x: Tensor, out: torch.dtype) -> dict[str, Tensor]:
    """All tensors after the plan for x [M, K] times `weight`."""
    stored = pack_quantized.pack(weight, case.grid)
    scales, group = layout.split_groups(weight.scale.to(x.dtype), case.grid.group_size)
    packing = Packing(case.grid.bits, group, weight.zero is not None)
    shape = Shape(x.shape[0], case.rows, case.columns)
    tensors = {
        "x": x,
        "words": layout.blocked(stored["weight_packed"], case.grid.bits),
        "scales": scales,
        "out": torch.full((x.shape[0], case.rows), torch.nan, dtype=out),
    }
    if weight.zero is not None:
        tensors["zeros"] = layout.split_groups(weight.zero, case.grid.group_size)[0]
    return interpreted(packed_product(shape, packing, "bf16", case.processors), tensors, case.target)


def decibels(got: Tensor, want: Tensor) -> float:
    """Signal to noise ratio of `got`."""
    return float(10 * torch.log10(want.double().square().sum() / (got.double() - want.double()).square().sum()))


# One token meets the same code on every target.
PRODUCTS = [(name, tokens) for name in CASES for tokens in (1, 7, 33) if tokens > 1 or "Blackwell" not in name]


@pytest.mark.parametrize(("name", "tokens"), PRODUCTS)
def test_products(name: str, tokens: int) -> None:
    """In float32 throughout, so that nothing is left but the order of the sums."""
    case = CASES[name]
    weight = random_weight(case)
    x = torch.randn(tokens, case.columns, generator=GENERATOR)
    want = x.double() @ dequantize(weight).double().T
    assert decibels(product(case, weight, x, torch.float32), want) > 115


@pytest.mark.parametrize("tokens", [2, 16, 17, 65])
def test_every_number_of_tokens(tokens: int) -> None:
    """Around the sizes of the tiles."""
    case = CASES["group 32"]
    weight = random_weight(case)
    x = torch.randn(tokens, case.columns, generator=GENERATOR)
    assert decibels(product(case, weight, x, torch.float32), x.double() @ dequantize(weight).double().T) > 115


@pytest.mark.parametrize("tokens", [1, 5, 17])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    "name", ["group 96, asymmetric", "int8 group 128, in parts", "Blackwell, group 64, asymmetric"]
)
def test_products_in_16_bits(name: str, dtype: torch.dtype, tokens: int) -> None:
    """Several tokens meet weights rounded to 16 bits, as in the reference, and one token exact ones: bit for bit."""
    case = CASES[name]
    weight = random_weight(case)
    x = torch.randn(tokens, case.columns, generator=GENERATOR).to(dtype)
    scale = weight.scale.to(dtype)
    dense = dequantize(Quantized(weight.q, scale, weight.zero))
    rounded = dense if tokens == 1 else dense.to(dtype)
    want = x.double() @ rounded.double().T
    assert decibels(product(case, weight, x, torch.float32), want) > 115
    assert decibels(product(case, weight, x, dtype), want) > (45 if dtype == torch.bfloat16 else 62)


def test_parts_are_summed_in_order() -> None:
    """Two runs of a plan in parts give the same bits, which are those of the parts added one after the other."""
    case = CASES["group 128, in parts"]
    weight = random_weight(case)
    x = torch.randn(3, case.columns, generator=GENERATOR)
    first, again = run(case, weight, x, torch.float32), run(case, weight, x, torch.float32)
    assert torch.equal(first["out"], again["out"])
    total = torch.zeros_like(first["out"])
    assert len(first["partial"]) > 2
    for part in first["partial"]:
        total += part
    assert torch.equal(first["out"], total)


@pytest.mark.parametrize("tokens", [1, 4])
def test_activations_that_are_not_finite_show(tokens: int) -> None:
    case = CASES["group 32"]
    x = torch.ones(tokens, case.columns)
    x[0, -1] = torch.inf
    finite = product(case, random_weight(case), x, torch.float32).isfinite()
    assert not finite[0].any() and finite[1:].all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [64, 104, 128, 416, 576])
def test_the_layout_is_exact_both_ways(bits: int, columns: int) -> None:
    words = torch.randint(-(1 << 31), 1 << 31, (5, columns * bits // 32), generator=GENERATOR).to(torch.int32)
    blocked = layout.blocked(words, bits)
    assert blocked.shape == (5, -(-columns // layout.block_columns(bits)) * layout.LANES)
    assert torch.equal(layout.stored(blocked, bits, columns), words)


def test_the_layout_is_the_one_described() -> None:
    """Bits j * 4.. of word w of a block hold column j * 16 + w."""
    q = torch.randint(-8, 8, (3, 256), dtype=torch.int8, generator=GENERATOR)
    blocked = layout.blocked(pack_quantized.pack_words(q, 4), 4)
    for block, word, value in [(0, 0, 0), (0, 5, 3), (1, 15, 7), (1, 0, 1)]:
        found = (blocked[:, block * 16 + word] >> (4 * value)) & 15
        assert torch.equal(found - 8, q[:, block * 128 + value * 16 + word].int())


def test_groups_are_split_into_powers_of_two() -> None:
    scales, group = layout.split_groups(torch.tensor([[1.0, 2.0]]), 96)
    assert group == 32 and scales.tolist() == [[1, 1, 1, 2, 2, 2]]
    assert layout.split_groups(scales, 64)[1] == 64 and layout.split_groups(scales, None) == (scales, None)


def test_what_cannot_be_multiplied_is_refused_with_a_reason() -> None:
    int4 = Packing(4, 128)
    assert product_refuses(Shape(1, 64, 128), "bf16", int4) is None
    assert "activations are fp32, not bf16 or fp16" in str(product_refuses(Shape(1, 64, 128), "fp32", int4))
    assert "65 x 128 is not a multiple of 16" in str(product_refuses(Shape(1, 65, 128), "bf16", int4))
    assert "4 bits need groups of 32" in str(product_refuses(Shape(1, 64, 128), "bf16", Packing(4, 16)))
    assert "8 bits need groups of 64" in str(product_refuses(Shape(1, 64, 128), "bf16", Packing(8, 32)))
    assert "more than 31 bits" in str(product_refuses(Shape(1 << 20, 64, 4096), "bf16", int4))
    with pytest.raises(InputError, match="not a multiple of 16 both ways: use the reference"):
        packed_product(Shape(1, 64, 100), int4, "bf16", 132)
