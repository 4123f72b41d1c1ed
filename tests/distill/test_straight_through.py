"""Layers on their grid: nothing moves by loading, gradients against autograd on an obvious twin, masks that hold."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from compress.distill.straight_through import GridLinear
from compress.formats import format_named
from compress.formats.grid import FLOAT_BITS, Quantized, dequantize
from compress.formats.scheme import Scheme, scheme_named
from tests.training.compressed import OUTLIERS, SCHEMES, on_grid

N, K = 24, 64


def weight(seed: int = 0) -> Tensor:
    found = torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * 0.1
    found[3, :32] = 0  # a dead group
    found[5] *= -1e-3
    return found


def stored(scheme: Scheme) -> Quantized:
    """As a checkpoint tells it: where zeros are not stored as such, the mask is what is not zero."""
    found = on_grid(weight(), scheme)
    if scheme.pattern is not None and found.mask is None:
        zero = torch.zeros(N, 1) if found.zero is None else found.zero
        found = replace(found, mask=found.q != zero.repeat_interleave(K // zero.shape[1], 1))
    return found


def pack(quantized: Quantized, scheme: Scheme) -> dict[str, Tensor]:
    return format_named(scheme.format).pack(quantized, scheme.grid)


def trained(layer: GridLinear, steps: int = 20, rate: float = 5e-3) -> GridLinear:
    """`layer` after some steps of AdamW, with decay, towards another weight."""
    optimizer = torch.optim.AdamW(layer.parameters(), lr=rate, weight_decay=0.1)
    x = torch.randn(64, K, generator=torch.Generator().manual_seed(1))
    target = x @ weight(2).T
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(layer(x), target).backward()
        optimizer.step()
    return layer


@pytest.mark.parametrize("name", SCHEMES)
def test_loading_moves_nothing(name: str) -> None:
    scheme = SCHEMES[name]
    before = stored(scheme)
    layer = GridLinear(before, scheme.grid)
    want, found = pack(before, scheme), pack(layer.quantized(), scheme)
    assert want.keys() == found.keys()
    for suffix, tensor in want.items():
        assert found[suffix].dtype == tensor.dtype and torch.equal(found[suffix], tensor), suffix
    assert torch.equal(layer.effective_weight(), dequantize(before))


def test_the_checkpoints_of_these_tests_have_scales_of_both_signs() -> None:
    assert (stored(SCHEMES["W4A16"]).scale < 0).any() and (stored(SCHEMES["W4A16"]).scale > 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_integer_survives_under_any_scale(bits: int, dtype: torch.dtype) -> None:
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    q = torch.arange(low, high + 1, dtype=torch.int8).repeat(2000, 1)
    scale = torch.exp(torch.randn(2000, 1, generator=torch.Generator().manual_seed(0)) * 3 - 4).to(dtype)
    scale[::2] *= -1
    zero = torch.randint(low, high + 1, (2000, 1), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    grid = scheme_named("W4A16" if bits == 4 else "W8A16", "channel").grid
    for held in (None, zero):
        found = GridLinear(Quantized(q, scale, held), grid).quantized()
        assert torch.equal(found.q, q) and torch.equal(found.scale, scale)


@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_trained_is_what_is_stored(name: str) -> None:
    scheme = SCHEMES[name]
    before = stored(scheme)
    layer = trained(GridLinear(before, scheme.grid))
    after = layer.quantized()
    assert torch.equal(dequantize(after), layer.effective_weight())
    assert not torch.equal(after.q, before.q)
    again = format_named(scheme.format).unpack(pack(after, scheme), scheme.grid)
    assert torch.equal(dequantize(again), dequantize(after))
    assert after.scale.dtype == before.scale.dtype
    if layer.scale is not None:
        assert not torch.equal(after.scale, before.scale) and torch.equal(after.scale.sign(), before.scale.sign())
    if before.mask is not None:
        assert torch.equal(after.mask, before.mask) and not layer.effective_weight()[~before.mask].any()
        assert not layer.weight[~before.mask].any()
    if before.outlier_columns is not None:
        assert not torch.equal(after.outlier_weight, before.outlier_weight)
        assert not after.q[:, list(OUTLIERS)].any()


def twin(layer: GridLinear, scheme: Scheme, latent: Tensor, scale: Tensor, outliers: Tensor | None) -> Tensor:
    """The weight of `layer`, its roundings as `x + (round(x) - x).detach()`: autograd does the rest, slowly."""

    def through(value: Tensor, rounded: Tensor) -> Tensor:
        return value + (rounded - value).detach()

    if scheme.grid.bits == FLOAT_BITS:
        return through(latent, latent.to(torch.bfloat16).double()) * layer.mask
    step = scale * layer.turn
    step = through(step, step.to(torch.bfloat16).double()).repeat_interleave(K // scale.shape[1], 1)
    zero = 0 if layer.zero is None else layer.zero.double().repeat_interleave(K // scale.shape[1], 1)
    ratio = latent / step
    # LSQ, equation 1: clamp first, then round.
    bounded = (
        torch.maximum(
            torch.minimum(ratio, scheme.grid.maximum - zero + torch.zeros_like(ratio)), scheme.grid.minimum - zero
        )
        if layer.zero is not None
        else ratio.clamp(scheme.grid.minimum, scheme.grid.maximum)
    )
    result = through(bounded, bounded.round()) * step
    result = result if layer.mask is None else result * layer.mask
    if outliers is None:
        return result
    return result.index_copy(1, torch.tensor(OUTLIERS), through(outliers, outliers.to(torch.bfloat16).double()))


@pytest.mark.parametrize("name", SCHEMES)
def test_gradients_equal_autograd_through_the_obvious_twin(name: str) -> None:
    scheme = SCHEMES[name]
    layer = GridLinear(stored(scheme), scheme.grid)
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():  # off the grid, and some of it beyond the ends; never within half a step of one
        layer.weight.add_(torch.randn(N, K, generator=noise) * layer.weight.std() * 0.2)
        if layer.mask is not None:
            layer.weight.mul_(layer.mask)
        layer.weight[0].mul_(3)
    x, direction = torch.randn(8, K, generator=noise), torch.randn(8, N, generator=noise)
    (layer(x) * direction).sum().backward()
    leaves = [None if one is None else one.detach().double().requires_grad_() for one in _moving(layer)]
    wanted = twin(layer, scheme, *leaves)  # type: ignore[arg-type]
    assert torch.equal(wanted.detach().float(), layer.effective_weight().detach()) or scheme.grid.bits != FLOAT_BITS
    (F.linear(x.double(), wanted) * direction).sum().backward()
    for mine, theirs in zip(_moving(layer), leaves, strict=True):
        if mine is not None and theirs is not None:
            gradient = theirs.grad
            if mine is layer.weight:  # between a bound and half a step beyond it, clamping first stops what rounds
                same = _settled(layer, scheme)
                assert same.float().mean() > 0.8
                assert torch.allclose(mine.grad[same].double(), gradient[same], rtol=1e-5, atol=1e-6)
            elif mine is layer.scale:
                rows = _settled(layer, scheme).view(*layer.scale.shape, -1).all(-1)
                assert rows.any()
                assert torch.allclose(mine.grad[rows].double(), gradient[rows], rtol=1e-4, atol=1e-5)
            else:
                assert torch.allclose(mine.grad.double(), gradient, rtol=1e-5, atol=1e-6)
    if layer.scale is not None:
        assert bool((layer.weight.grad[0] == 0).sum() > (layer.weight.grad[1] == 0).sum()), "nothing was clamped"


def _moving(layer: GridLinear) -> list[Tensor | None]:
    return [layer.weight, layer.scale, layer.outlier_weight]


def _settled(layer: GridLinear, scheme: Scheme) -> Tensor:
    """Where clamping before or after rounding is the same: not in the half step behind the last point of the grid."""
    if layer.scale is None:
        return torch.ones(N, K, dtype=torch.bool)
    step = (layer.scale * layer.turn).to(torch.bfloat16).float().detach()
    zero = torch.zeros_like(step) if layer.zero is None else layer.zero.float()
    ratio = layer.weight.detach().view(*step.shape, -1) / step.unsqueeze(-1) + zero.unsqueeze(-1)
    low, high = scheme.grid.minimum, scheme.grid.maximum
    between = ((ratio > high) & (ratio < high + 0.5)) | ((ratio < low) & (ratio > low - 0.5))
    return ~between.view(N, K)


def test_a_scale_that_is_held_costs_nothing_and_stays() -> None:
    scheme = SCHEMES["W4A16"]
    before = stored(scheme)
    layer = GridLinear(before, scheme.grid)
    layer.scale.requires_grad_(False)
    after = trained(layer).quantized()
    assert torch.equal(after.scale, before.scale) and not torch.equal(after.q, before.q)


def test_a_scale_never_turns_or_vanishes() -> None:
    scheme = SCHEMES["W4A16"]
    layer = GridLinear(stored(scheme), scheme.grid)
    before = layer.quantized().scale
    with torch.no_grad():
        layer.scale.sub_(10)
    after = layer.quantized()
    assert torch.equal(after.scale.sign(), before.sign()) and torch.isfinite(layer.effective_weight()).all()
    assert torch.equal(dequantize(after), layer.effective_weight())


def test_inputs_are_rounded_and_gradients_pass() -> None:
    scheme = SCHEMES["W8A8"]
    bias = torch.randn(N)
    layer = GridLinear(stored(scheme), scheme.grid, bias, lambda x: (x * 4).round() / 4)
    x = torch.randn(5, K, requires_grad=True)
    y = layer(x)
    held = dequantize(stored(scheme))
    assert torch.allclose(y, ((x * 4).round() / 4) @ held.T + bias, atol=1e-6)
    y.sum().backward()
    assert torch.allclose(x.grad, held.sum(0).expand(5, K), atol=1e-5)
    assert torch.allclose(layer.weight.grad[0], ((x * 4).round() / 4).sum(0).detach(), atol=1e-5)


def test_training_comes_nearer_than_rounding() -> None:
    """A layer on W4A16 is fitted to the outputs of a float one: at least 4 dB over round to nearest.

    Its inputs span a quarter of their space, since no rounding is better than the nearest where all directions count.
    """
    scheme = scheme_named("W4A16", 32)
    layer = GridLinear(on_grid(weight(), scheme), scheme.grid)
    noise = torch.Generator().manual_seed(4)
    x = torch.randn(512, K // 4, generator=noise) @ torch.randn(K // 4, K, generator=noise)
    target = x @ weight().T
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-4)
    losses = []
    for _ in range(300):
        optimizer.zero_grad()
        loss = F.mse_loss(layer(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert 10 * math.log10(losses[0] / min(losses)) > 4


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_a_scale_that_no_weight_has_is_refused(value: float) -> None:
    quantized = stored(SCHEMES["W4A16"])
    scale = quantized.scale.clone()
    scale[2, 1] = value
    with pytest.raises(ValueError, match="zero or not finite"):
        GridLinear(replace(quantized, scale=scale), SCHEMES["W4A16"].grid)
