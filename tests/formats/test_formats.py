"""Formats: exact round trips, layouts against slow oracles, and refusals."""

from __future__ import annotations

import pytest
import torch

from compress.errors import InputError
from compress.formats import FORMATS, format_named, int8_outlier, int_quantized, pack_quantized
from compress.formats.grid import Grid, Quantized, dequantize
from compress.formats.scheme import SCHEMES, scheme_named

GRIDS = [Grid(4, True, 32), Grid(4, False, 64), Grid(4, True, None), Grid(8, True, 32), Grid(8, False, None)]
SHAPE = (16, 128)


def random_quantized(grid: Grid, shape: tuple[int, int] = SHAPE) -> Quantized:
    generator = torch.Generator().manual_seed(grid.bits)
    groups = grid.groups(shape[1])

    def integers(*size: int) -> torch.Tensor:
        return torch.randint(grid.minimum, grid.maximum + 1, size, generator=generator).to(torch.int8)

    scale = torch.rand(shape[0], groups, generator=generator).add(0.01).to(torch.bfloat16)
    return Quantized(integers(*shape), scale, None if grid.symmetric else integers(shape[0], groups))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_packing_round_trips_and_keeps_its_specs(grid: Grid) -> None:
    quantized = random_quantized(grid)
    assert pack_quantized.refuses(SHAPE, grid) is None
    stored = pack_quantized.pack(quantized, grid)
    specs = pack_quantized.specs(SHAPE, grid, torch.bfloat16)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in stored.items()} == {
        name: (spec.dtype, spec.shape) for name, spec in specs.items()
    }
    assert sum(spec.nbytes for spec in specs.values()) == sum(t.nbytes for t in stored.values())
    back = pack_quantized.unpack(stored, grid)
    assert torch.equal(back.q, quantized.q) and torch.equal(back.scale, quantized.scale)
    assert back.zero is None if quantized.zero is None else torch.equal(back.zero, quantized.zero)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_hold_what_a_bit_by_bit_packer_puts_there(bits: int) -> None:
    values = random_quantized(Grid(bits), (3, 64)).q
    expected = []
    for row in values.tolist():
        stream = 0
        for j, value in enumerate(row):
            stream |= (value + (1 << (bits - 1))) << (j * bits)
        words = [(stream >> (32 * w)) & 0xFFFFFFFF for w in range(64 * bits // 32)]
        expected.append([word - (1 << 32) if word >= 1 << 31 else word for word in words])
    assert pack_quantized.pack_words(values, bits).tolist() == expected


def test_zero_points_are_packed_along_rows() -> None:
    quantized = random_quantized(Grid(4, False, 64))
    assert quantized.zero is not None
    stored = pack_quantized.pack(quantized, Grid(4, False, 64))["weight_zero_point"]
    word = sum((int(quantized.zero[row, 1]) + 8) << (4 * row) for row in range(8))
    assert int(stored[0, 1]) & 0xFFFFFFFF == word


def test_dequantize_is_q_minus_zero_times_scale() -> None:
    quantized = random_quantized(Grid(4, False, 32))
    assert quantized.zero is not None
    weight = dequantize(quantized)
    for row, column in [(0, 0), (3, 31), (7, 32), (15, 127)]:
        group = column // 32
        exact = (int(quantized.q[row, column]) - int(quantized.zero[row, group])) * float(quantized.scale[row, group])
        assert float(weight[row, column]) == exact


def test_outlier_columns_replace_the_grid() -> None:
    base = random_quantized(Grid(8))
    columns = torch.tensor([3, 70], dtype=torch.int32)
    kept = torch.randn(16, 2, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    q = base.q.index_fill(1, columns.long(), 0)
    quantized = Quantized(q, base.scale, outlier_columns=columns, outlier_weight=kept)
    stored = int8_outlier.pack(quantized, Grid(8))
    specs = int8_outlier.specs(SHAPE, Grid(8), torch.bfloat16, outliers=2)
    assert {name: tuple(t.shape) for name, t in stored.items()} == {name: spec.shape for name, spec in specs.items()}
    weight = dequantize(int8_outlier.unpack(stored, Grid(8)))
    assert torch.equal(weight[:, columns.long()], kept.float())
    assert torch.equal(weight[:, 4:70], base.q[:, 4:70].float() * base.scale.float())
    with pytest.raises(ValueError, match="has none"):
        int8_outlier.pack(base, Grid(8))


@pytest.mark.parametrize(
    ("shape", "grid", "words"),
    [
        ((16, 12), Grid(4), "12 input columns do not fill"),
        ((12, 64), Grid(4, False), "12 output rows do not fill"),
        ((16, 64), Grid(3), "not 3"),
    ],
)
def test_packing_refuses(shape: tuple[int, int], grid: Grid, words: str) -> None:
    assert words in (pack_quantized.refuses(shape, grid) or "")


def test_rowwise_refuses_groups() -> None:
    assert "one scale per row" in (int_quantized.refuses((16, 64), Grid(8, True, 32)) or "")
    assert int8_outlier.refuses((16, 64), Grid(8)) is None


def test_schemes_name_formats_and_take_group_sizes() -> None:
    assert {scheme.format for scheme in SCHEMES.values()} <= set(FORMATS)
    assert scheme_named("W4A16", 32).grid == Grid(4, True, 32)
    assert scheme_named("W4A16", "channel").grid == Grid(4, True, None)
    assert format_named("pack-quantized") is pack_quantized


@pytest.mark.parametrize(
    ("name", "group", "words"),
    [("W4A6", None, "did you mean 'W4A16'"), ("W8A8", 64, "leave it out"), ("W4A16", 0, "not positive")],
)
def test_scheme_mistakes_are_named(name: str, group: int | None, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        scheme_named(name, group)
    assert caught.value.exit_code == 2
    with pytest.raises(InputError, match="did you mean 'int8-outlier'"):
        format_named("int8-outlyer")
