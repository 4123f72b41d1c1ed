"""sparse24: exact round trips, bytes against a slow packer, sizes, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.errors import InputError
from compress.formats import sparse24
from compress.formats.grid import FLOAT_BITS, Grid, Quantized, dequantize
from compress.formats.pattern import Pattern, follows, keep_largest, pattern_named
from compress.formats.scheme import FLOATS, pruned, scheme_named

GRIDS = [Grid(4, True, 32), Grid(4), Grid(8, True, 64), Grid(8), Grid(FLOAT_BITS)]
SHAPE = (6, 128)


def random_mask(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return keep_largest(torch.rand(shape, generator=generator), sparse24.PATTERN)


def random_sparse(grid: Grid, shape: tuple[int, int] = SHAPE) -> Quantized:
    """Values over the whole grid, a quarter of the kept ones zero."""
    generator = torch.Generator().manual_seed(grid.bits)
    mask = random_mask(shape, generator)
    if grid.bits == FLOAT_BITS:
        q = torch.randn(shape, generator=generator).to(torch.bfloat16)
        scale = torch.ones(shape[0], 1)
    else:
        q = torch.randint(grid.minimum, grid.maximum + 1, shape, generator=generator).to(torch.int8)
        scale = torch.rand(shape[0], grid.groups(shape[1]), generator=generator).add(0.01).to(torch.bfloat16)
    q = q.masked_fill(~mask | (torch.rand(shape, generator=generator) < 0.25), 0)
    return Quantized(q, scale, mask=mask)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("columns", [128, 64, 192])
def test_round_trips_and_keeps_its_specs(grid: Grid, columns: int) -> None:
    shape = (6, columns)
    weight = random_sparse(grid, shape)
    assert sparse24.refuses(shape, grid) is None
    stored = sparse24.pack(weight, grid)
    specs = sparse24.specs(shape, grid, torch.bfloat16)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in stored.items()} == {
        name: (spec.dtype, spec.shape) for name, spec in specs.items()
    }
    back = sparse24.unpack(stored, grid)
    assert torch.equal(back.q, weight.q) and torch.equal(back.mask, weight.mask)  # type: ignore[arg-type]
    assert torch.equal(dequantize(back), dequantize(weight)) and back.q.dtype == weight.q.dtype
    assert sparse24.shape({name: tuple(t.shape) for name, t in stored.items()}, grid) == shape


def test_an_odd_number_of_groups() -> None:
    """K = 12: three groups of four columns, so that half of the last index byte is padding."""
    weight = random_sparse(Grid(8), (3, 12))
    stored = sparse24.pack(weight, Grid(8))
    assert stored["weight_indices"].shape == (3, 2) and not bool((stored["weight_indices"][:, 1] >> 4).any())
    assert torch.equal(sparse24.unpack(stored, Grid(8)).mask, weight.mask)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_are_those_of_a_slow_packer(bits: int) -> None:
    weight = random_sparse(Grid(bits), (3, 16))
    stored = sparse24.pack(weight, Grid(bits))
    assert weight.mask is not None
    for row in range(3):
        values, nibbles = [], []
        for start in range(0, 16, 4):
            kept = [column for column in range(4) if weight.mask[row, start + column]]
            nibbles.append(kept[0] + 4 * kept[1])
            values += [int(weight.q[row, start + column]) for column in kept]
        indices = [nibbles[at] + 16 * nibbles[at + 1] for at in range(0, 4, 2)]
        assert stored["weight_indices"][row].tolist() == indices
        if bits == 4:
            values = [values[at] + 8 + 16 * (values[at + 1] + 8) for at in range(0, 8, 2)]
        assert stored["weight_values"][row].tolist() == values


@pytest.mark.parametrize(
    ("grid", "bits"), [(Grid(4, True, 128), 3.125), (Grid(8), 5 + 16 / 4096), (Grid(FLOAT_BITS), 9.0)], ids=str
)
def test_size(grid: Grid, bits: float) -> None:
    """Three, five and nine bits per weight, and a scale of 16 bits per group."""
    specs = sparse24.specs((512, 4096), grid, torch.bfloat16)
    assert 8 * sum(spec.nbytes for spec in specs.values()) / (512 * 4096) == bits


@pytest.mark.parametrize(
    ("shape", "grid", "reason"),
    [
        ((4, 30), Grid(8), "30 input columns are not a multiple of 4"),
        ((4, 64), Grid(4, False, 32), "symmetric"),
        ((4, 64), Grid(4, True, 48), "group size 48"),
        ((4, 60), Grid(4, True, 6), "group size 6"),
        ((4, 64), Grid(2), "not 2"),
    ],
)
def test_refusals(shape: tuple[int, int], grid: Grid, reason: str) -> None:
    assert reason in (sparse24.refuses(shape, grid) or "")


def test_what_is_no_2_4_weight_is_refused() -> None:
    weight = random_sparse(Grid(8))
    assert weight.mask is not None
    for mask in (None, torch.ones_like(weight.mask), keep_largest(torch.rand(SHAPE), Pattern(4, 8)).roll(1, 1)):
        with pytest.raises(ValueError, match="2:4 mask"):
            sparse24.pack(Quantized(weight.q, weight.scale, mask=mask), Grid(8))
    with pytest.raises(ValueError, match="outside of its mask"):
        sparse24.pack(Quantized(torch.ones_like(weight.q), weight.scale, mask=weight.mask), Grid(8))
    stored = sparse24.pack(weight, Grid(8))
    stored["weight_indices"][2, 3] = 0  # twice the first column
    with pytest.raises(ValueError, match="do not ascend"):
        sparse24.unpack(stored, Grid(8))


def test_schemes() -> None:
    sparse = pruned(scheme_named("W4A16", 64), sparse24.PATTERN)
    assert (sparse.name, sparse.format, str(sparse.pattern)) == ("W4A16+2:4", "sparse24", "2:4")
    assert pruned(scheme_named("W4A16"), Pattern(4, 8)).format == "pack-quantized"
    assert pruned(FLOATS, sparse24.PATTERN).name == "W16A16+2:4"


@pytest.mark.parametrize("text", ["24", "2:2", "0:4", "a:b", "2:4:8", ""])
def test_what_is_no_pattern(text: str) -> None:
    with pytest.raises(InputError, match="is no pattern: give kept columns of a group, such as 2:4"):
        pattern_named(text)


def test_largest_are_kept() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 0.0, 5.0, 5.0, 5.0, 5.0]])
    assert keep_largest(scores, Pattern(2, 4)).tolist() == [[False, True, True, False, True, True, False, False]]
    assert follows(keep_largest(scores, Pattern(1, 8)), Pattern(1, 8))
