"""The column solver: visit input columns one by one, let a rule decide each, and push its error onto those that follow.

Optimal Brain Surgeon as GPTQ (arXiv 2210.17323, algorithm 1) and SparseGPT (arXiv 2301.00774, algorithm 1) use it: with
H^-1 = U^T U, U upper triangular, the error of column j, divided by U[j, j], times row j of U is what the columns after
j must give way. Errors inside a block of columns are applied when a column is reached, the rest once per block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.formats.pattern import Pattern, keep_largest

MAXIMUM_DAMPING = 1.0
ESCALATION = 10.0
LEAST_RAISED = 0.001


@dataclass(frozen=True)
class Factor:
    """U [K, K] with (H + damping * mean(diag H) * I)^-1 = U^T U, and the damping that made H positive definite."""

    upper: Tensor
    damping: float


def factorize(hessian: Tensor, damping: float, order: Tensor | None = None) -> Factor | None:
    """Factor the damped inverse of `hessian` [K, K], its rows and columns taken in `order`.

    None when it is not positive definite even at MAXIMUM_DAMPING. The rule for a failing factorization: damping is
    multiplied by ESCALATION (0 becomes LEAST_RAISED) until it works or the maximum has failed.

    With F reversing the order of rows and columns, F H F = L L^T makes H = R R^T with R = F L F upper triangular, hence
    U = R^-1: one Cholesky factorization and one triangular inverse, no explicit H^-1. Besides `hessian`, two matrices
    of its size are alive at a time.
    """
    mean = hessian.diagonal().mean()
    if not torch.isfinite(mean) or mean <= 0:
        return None
    reverse = (torch.arange(len(hessian), device=hessian.device) if order is None else order).flip(0)
    while True:
        flipped = hessian.index_select(0, reverse).index_select(1, reverse)
        flipped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(flipped)
        del flipped
        if not failed:
            inverse = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
            torch.linalg.solve_triangular(lower, inverse, upper=False, out=inverse)
            del lower
            if bool(torch.isfinite(inverse.sum())):
                return Factor(inverse.flip(0, 1), damping)
        if damping >= MAXIMUM_DAMPING:
            return None
        damping = min(max(damping * ESCALATION, LEAST_RAISED), MAXIMUM_DAMPING)


def visiting_order(hessian: Tensor, activation_order: bool, width: int = 1) -> Tensor | None:
    """Columns of `hessian` [K, K] by falling activation energy, or None for as they are; groups of `width` columns,
    which pruning decides together, stay side by side."""
    if not activation_order:
        return None
    groups = hessian.diagonal().view(-1, width).sum(1).argsort(descending=True, stable=True)
    return (groups[:, None] * width + torch.arange(width, device=groups.device)).flatten()


def solve_columns(
    weight: Tensor,
    upper: Tensor,
    decide: Callable[[int, Tensor], Tensor],
    block_size: int = 128,
    choice: Choice | None = None,
) -> None:
    """Decide the columns of `weight` in order, compensating each one's error in those to come.

    weight: [K, N], the layer's weight transposed so that a column is one contiguous row; overwritten with the decided
    values. upper: [K, K] from `factorize`, in the same order and dtype (float32, or float64 to check it by).
    decide(j, values [N]) gives column j's final values. choice: what looks at the columns of a group, as they stand
    then, before the first of them is decided.
    """
    columns = len(weight)
    width = 1 if choice is None else choice.width
    block_size += -block_size % width
    for start in range(0, columns, block_size):
        stop = min(start + block_size, columns)
        block = weight[start:stop]
        corner = upper[start:stop, start:stop]
        errors = torch.empty_like(block)
        for j in range(stop - start):
            if choice is not None and j % width == 0:
                group = slice(j, j + width)
                choice.choose(start + j, block[group] - corner[:j, group].T @ errors[:j])
            values = torch.addmv(block[j], errors[:j].T, corner[:j, j], alpha=-1) if j else block[0].clone()
            decided = decide(start + j, values)
            torch.sub(values, decided, out=errors[j]).div_(corner[j, j])
            block[j] = decided
        weight[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)


class Choice:
    """SparseGPT's choice of a mask (arXiv 2301.00774, section 3.3): of every group of columns those are kept that would
    cost most to lose, w^2 / U[j, j]^2, judged when the group is reached.

    mask: bool [K, N] in visiting order, filled as the solver goes.
    """

    def __init__(self, pattern: Pattern, upper: Tensor, rows: int) -> None:
        self.pattern = pattern
        self.width = pattern.of
        self.costs = pivot_costs(upper)
        self.mask = torch.empty(len(upper), rows, dtype=torch.bool, device=upper.device)

    def choose(self, j: int, values: Tensor) -> None:
        """Fill the mask of the columns from `j` on, which stand at `values` [width, N]."""
        group = slice(j, j + self.width)
        self.mask[group] = keep_largest((values.square() * self.costs[group, None]).T, self.pattern).T


def pivot_costs(upper: Tensor, order: Tensor | None = None) -> Tensor:
    """What an error of each column costs [K] once the columns visited later have made up for it: U[j, j]^-2.

    In the order of the weight's columns, where `order` says in which they are visited.
    """
    costs = upper.diagonal().square().reciprocal()
    return costs if order is None else torch.empty_like(costs).index_copy_(0, order, costs)


def prune_columns(
    weight: Tensor, upper: Tensor, order: Tensor | None, pattern: Pattern, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """SparseGPT (arXiv 2301.00774, algorithm 1): `weight` [N, K] pruned, its kept values rounded to `dtype` but still
    in the weight's own, and its mask. upper: from `factorize`, in the order in which columns are visited."""
    visit = torch.arange(weight.shape[1], device=weight.device) if order is None else order
    choice = Choice(pattern, upper, len(weight))
    columns = weight.T[visit]

    def decide(j: int, values: Tensor) -> Tensor:
        return (values * choice.mask[j]).to(dtype).to(values.dtype)

    solve_columns(columns, upper, decide, block_size, choice)
    return back_in_order(columns, visit), back_in_order(choice.mask, visit)


def refit_columns(
    weight: Tensor, pruned: Tensor, mask: Tensor, hessian: Tensor, damping: float, block_size: int = 128
) -> Tensor:
    """`pruned` [N, K] after one sweep over its columns, each moved to where it best makes up for all the others.

    SparseGPT lets a column give way only to those before it; here the early ones see what was pruned after them. It is
    one round of Gauss-Seidel on the normal equations of what `mask` [N, K] keeps: `weight` [N, K] is what the outputs
    are held against, under H = hessian + damping * mean(diag) * I. Lowers the error whatever it begins with.

    The column solver does it with H for its factor: where a value stands by the gradient of its column, an error of
    gradient / H[j, j] is what its step takes off the gradients of those to come.
    """
    damped = hessian.clone()
    damped.diagonal().add_(damping * hessian.diagonal().mean())
    gradient = damped @ (weight - pruned).T
    refitted, kept = pruned.T.contiguous(), mask.T.contiguous()

    def decide(j: int, values: Tensor) -> Tensor:
        refitted[j].add_((values * kept[j]).div_(damped[j, j]))
        return values * ~kept[j]

    solve_columns(gradient, damped, decide, block_size)
    return refitted.T.contiguous()


def back_in_order(visited: Tensor, visit: Tensor) -> Tensor:
    """[K, N] in visiting order as [N, K] in the weight's own."""
    result = torch.empty_like(visited)
    result[visit] = visited
    return result.T.contiguous()
