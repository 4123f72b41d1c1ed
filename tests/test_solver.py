"""The column solver against an oracle that inverts and eliminates one column at a time in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.formats.pattern import Pattern, keep_largest
from compress.solver import MAXIMUM_DAMPING, factorize, prune_columns, refit_columns, solve_columns


def correlated_hessian(columns: int, tokens: int = 400, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    x = torch.randn(tokens, columns, generator=generator) @ mix
    return x.T @ x / tokens


def slow_solve(weight: Tensor, hessian: Tensor, damping: float, step: float) -> Tensor:
    """Optimal Brain Quantization in a fixed order: after each column, H^-1 of the rest by Gaussian elimination."""
    w = weight.double().clone()
    h = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    inverse = torch.linalg.inv(h)
    for j in range(w.shape[1]):
        decided = (w[:, j] / step).round() * step
        error = (w[:, j] - decided) / inverse[j, j]
        w -= error[:, None] * inverse[j]
        w[:, j] = decided
        inverse = inverse - inverse[:, j : j + 1] * inverse[j : j + 1] / inverse[j, j]
    return w


@pytest.mark.parametrize("block_size", [1, 7, 16, 128])
def test_equals_slow_elimination_whatever_the_block(block_size: int) -> None:
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    hessian = correlated_hessian(32)
    step = 0.25
    factor = factorize(hessian.double(), 0.01)
    assert factor is not None and factor.damping == 0.01
    solved = weight.T.double().contiguous()
    solve_columns(solved, factor.upper, lambda _, values: (values / step).round() * step, block_size)
    assert torch.allclose(solved.T, slow_solve(weight, hessian, 0.01, step), atol=1e-9)


def test_factor_inverts_the_damped_hessian() -> None:
    hessian = correlated_hessian(40)
    factor = factorize(hessian, 0.01)
    assert factor is not None
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(40)
    assert torch.allclose(factor.upper.T @ factor.upper @ damped, torch.eye(40), atol=1e-4)
    assert torch.equal(factor.upper, factor.upper.triu())


def test_damping_escalates_tenfold_until_it_works() -> None:
    hessian = correlated_hessian(16)
    hessian[0, 1] = hessian[1, 0] = 1.05 * float((hessian[0, 0] * hessian[1, 1]).sqrt())  # indefinite
    factor = factorize(hessian, 0.001)
    assert factor is not None
    assert factor.damping in (pytest.approx(0.01), pytest.approx(0.1), pytest.approx(1.0))
    damped = hessian + factor.damping / 10 * hessian.diagonal().mean() * torch.eye(16)
    assert float(torch.linalg.eigvalsh(damped)[0]) < 0, "the step before would have failed"
    undamped = factorize(torch.eye(4), 0.0)
    assert undamped is not None and undamped.damping == 0.0


def test_gives_up_beyond_the_maximum() -> None:
    assert factorize(torch.zeros(4, 4), 0.01) is None
    assert factorize(torch.full((4, 4), float("nan")), 0.01) is None
    hopeless = torch.eye(4)
    hopeless[0, 1] = hopeless[1, 0] = 10.0
    assert factorize(hopeless, MAXIMUM_DAMPING / 100) is None


@pytest.mark.parametrize("damping", [0.01, 0.05, 0.3, 1.0])
def test_the_maximum_itself_is_tried(damping: float) -> None:
    barely = torch.eye(2)
    barely[0, 1] = barely[1, 0] = 1.9  # positive definite from a damping of 0.9 on
    factor = factorize(barely, damping)
    assert factor is not None and factor.damping == pytest.approx(MAXIMUM_DAMPING)


def damped(hessian: Tensor, damping: float) -> Tensor:
    return hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=hessian.dtype)


def pruned_by_magnitude(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A weight [6, 32], what magnitude pruning leaves of it, the mask, and a Hessian."""
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(1), dtype=dtype)
    mask = keep_largest(weight.abs(), Pattern(2, 4))
    return weight, weight * mask, mask, correlated_hessian(32).to(dtype)


@pytest.mark.parametrize("block_size", [1, 7, 16, 128])
def test_a_sweep_moves_each_kept_weight_to_its_least_error(block_size: int) -> None:
    weight, pruned, mask, hessian = pruned_by_magnitude()
    refitted = refit_columns(weight, pruned, mask, hessian, 0.01, block_size)
    slow, whole = pruned.clone(), damped(hessian, 0.01)
    for j in range(32):
        slow[:, j] += mask[:, j] * ((weight - slow) @ whole[:, j]) / whole[j, j]
    assert torch.allclose(refitted, slow, atol=1e-12)
    assert refitted.dtype == torch.float64 and not bool(refitted[~mask].any())
    assert torch.equal(pruned, weight * mask), "what it is given is left alone"


def test_sweeps_lower_the_error_down_to_least_squares() -> None:
    weight, pruned, mask, hessian = pruned_by_magnitude()
    whole = damped(hessian, 0.01)
    best = torch.zeros_like(weight)
    for row, kept in enumerate(mask):
        best[row, kept] = torch.linalg.solve(whole[kept][:, kept], whole[kept] @ weight[row])
    losses = []
    for _ in range(200):
        losses.append(float((((weight - pruned) @ whole) * (weight - pruned)).sum()))
        pruned = refit_columns(weight, pruned, mask, hessian, 0.01)
    least = float((((weight - best) @ whole) * (weight - best)).sum())
    assert all(after < before for before, after in zip(losses[:10], losses[1:11], strict=True)), losses[:11]
    assert losses[-1] == pytest.approx(least, rel=1e-6) and least < 0.7 * losses[0]


def test_pruning_stays_in_the_dtype_it_is_given() -> None:
    for dtype in (torch.float32, torch.float64):
        weight, _, _, hessian = pruned_by_magnitude(dtype)
        factor = factorize(hessian, 0.01)
        assert factor is not None and factor.upper.dtype == dtype
        kept, mask = prune_columns(weight, factor.upper, None, Pattern(2, 4), 16, torch.bfloat16)
        assert kept.dtype == dtype and torch.equal(kept, kept.bfloat16().to(dtype))
        assert refit_columns(weight, kept, mask, hessian, 0.01).dtype == dtype
