"""SparseGPT and its joint pass with GPTQ against one column at a time, with floors in shares of the signal."""

from __future__ import annotations

import pytest
import torch

from compress.formats.grid import Grid, dequantize
from compress.formats.pattern import Pattern, follows
from compress.prune import magnitude, sparsegpt, wanda
from compress.quantize import gptq
from compress.stats import InputStats
from tests.prune.oracle import COLUMNS, HALF, PATTERNS, best_mask, loss, slow_columns, stats, visited, weight
from tests.test_solver import correlated_hessian

# float32 agrees as far as its sums do; in float64 the solver is the oracle but for the order of its sums.
DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-9)], ids=str)


@PATTERNS
@pytest.mark.parametrize("activation_order", [True, False])
@pytest.mark.parametrize("block_size", [16, 128])
@DTYPES
def test_sparsegpt_agrees_with_the_slow_oracle(
    pattern: Pattern, activation_order: bool, block_size: int, dtype: torch.dtype, tolerance: float
) -> None:
    config = sparsegpt.Config(activation_order=activation_order, block_size=block_size)
    pruned = sparsegpt.prune(weight().to(dtype), stats(dtype), pattern, config, dtype)
    oracle, mask = slow_columns(weight(), pattern, visited(pattern, activation_order), None, config.damping)
    assert torch.equal(pruned.mask, mask) and follows(pruned.mask, pattern)
    assert pruned.weight.dtype == dtype
    assert float((pruned.weight - oracle).abs().max()) < tolerance
    assert loss(weight(), pruned.weight) == pytest.approx(loss(weight(), oracle), rel=tolerance)
    assert not bool(pruned.weight[~pruned.mask].any())


@PATTERNS
@pytest.mark.parametrize("activation_order", [True, False])
@pytest.mark.parametrize("block_size", [16, 128])
def test_the_joint_pass_agrees_with_the_slow_oracle(pattern: Pattern, activation_order: bool, block_size: int) -> None:
    grid, config = Grid(4, True, 32), gptq.Config(activation_order=activation_order, block_size=block_size)
    wide = gptq.quantize(weight().double(), stats(torch.float64), grid, config, torch.float32, pattern).quantized
    oracle, mask = slow_columns(weight(), pattern, visited(pattern, activation_order), grid, config.damping)
    assert wide.mask is not None and torch.equal(wide.mask, mask) and follows(mask, pattern)
    assert loss(weight(), dequantize(wide)) == pytest.approx(loss(weight(), oracle), rel=1e-6)
    assert not bool(wide.q[~mask].any())
    narrow = gptq.quantize(weight(), stats(), grid, config, torch.float32, pattern).quantized
    # A value at a tie may be rounded the other way in float32, and what follows then differs: the loss is the same.
    assert narrow.mask is not None and float((narrow.mask == mask).float().mean()) > 0.98
    assert loss(weight(), dequantize(narrow)) == pytest.approx(loss(weight(), oracle), rel=0.02)


def test_each_method_loses_less_than_the_one_before() -> None:
    """On inputs of unlike size, as those of language models are; floors in shares of the signal."""
    size = torch.logspace(-1, 1, COLUMNS)[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))]
    hessian = correlated_hessian(COLUMNS) * size * size[:, None]
    seen = InputStats(400, mean_square=hessian.diagonal(), hessian=hessian)
    losses = []
    for method in (sparsegpt, wanda, magnitude):
        decided = method.prune(weight(), seen, HALF, method.Config(), torch.float32).weight
        error = weight() - decided
        losses.append(float(((error @ hessian) * error).sum() / ((weight() @ hessian) * weight()).sum()))
    assert losses == sorted(losses), losses
    assert losses[0] < 0.05 and losses[0] < 0.9 * losses[1] < 0.5 * losses[2], losses


def test_a_joint_pass_loses_less_than_two() -> None:
    """It knows what the outputs were before pruning, which the second of two stages does not."""
    grid, config = Grid(4, True, 32), gptq.Config()
    joint = gptq.quantize(weight(), stats(), grid, config, torch.float32, HALF)
    pruned = sparsegpt.prune(weight(), stats(), HALF, sparsegpt.Config(), torch.float32)
    after = gptq.quantize(pruned.weight, stats(), grid, config, torch.float32, pruned.mask)
    assert torch.equal(after.quantized.mask, pruned.mask)  # type: ignore[arg-type]
    assert not bool(after.quantized.q[~pruned.mask].any())
    assert loss(weight(), dequantize(joint.quantized)) < 0.9 * loss(weight(), dequantize(after.quantized))


def test_kept_values_are_rounded_as_they_are_stored() -> None:
    pruned = sparsegpt.prune(weight(), stats(), HALF, sparsegpt.Config(), torch.bfloat16)
    assert torch.equal(pruned.weight, pruned.weight.bfloat16().float())


def test_a_hessian_of_no_help() -> None:
    broken = InputStats(400, hessian=torch.full((COLUMNS, COLUMNS), torch.nan))
    pruned = sparsegpt.prune(weight(), broken, HALF, sparsegpt.Config(), torch.float32)
    assert pruned.fallback is not None and "magnitude" in pruned.fallback
    assert torch.equal(pruned.mask, best_mask(weight().abs(), HALF))
    solved = gptq.quantize(weight(), broken, Grid(4, True, 32), gptq.Config(), torch.float32, HALF)
    assert solved.fallback is not None and solved.fallback.endswith("pruned by magnitude")
    assert torch.equal(solved.quantized.mask, pruned.mask)  # type: ignore[arg-type]


def test_missing_statistics() -> None:
    with pytest.raises(ValueError, match="Hessian"):
        sparsegpt.prune(weight(), None, HALF, sparsegpt.Config(), torch.float32)
