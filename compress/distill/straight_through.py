"""A linear layer that is trained on the very grid it is stored on: gradients pass straight through every rounding.

Straight-through estimator: Bengio et al., arXiv 1308.3432; learnt steps: LSQ, arXiv 1902.08153, section 2. What a step
computes with is what would be stored after it, bit for bit, so a held-out measurement needs no conversion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.formats.grid import FLOAT_BITS, Grid, Quantized, dequantize

Rounding = Callable[[Tensor], Tensor]


class GridLinear(nn.Module):
    """y = round(x) W^T + b, where W [N, K] is on a grid, or is made of pruned 16-bit floats.

    weight: float32 [N, K], what moves; on a symmetric grid W = clamp(round(weight / s)) * s. scale: float32 [N, G],
    what moves of the steps s: their magnitude times 2^(bits - 1), which is the far end of the grid. In those units it
    is as large as the weights, so that one learning rate fits both whatever the bits; LSQ's own factor on the gradient
    would be lost in Adam, which divides it out. Signs of steps are held, and a step is rounded to the dtype it is
    stored in. None for floats, whose weights are rounded to their stored dtype. outlier_weight: float32 [N, n], rounded
    to its stored dtype. Zero points, the mask and the outlier columns are held: a pruned weight is zero, and so is its
    gradient.

    rounding: what becomes of inputs [..., K] at run time (8-bit activations), None for nothing.
    """

    turn: Tensor
    zero: Tensor | None
    mask: Tensor | None
    outlier_columns: Tensor | None

    def __init__(
        self, quantized: Quantized, grid: Grid, bias: Tensor | None = None, rounding: Rounding | None = None
    ) -> None:
        """Stand for `quantized`. Raises ValueError for scales that are zero or not finite, which no weight has."""
        super().__init__()
        self.grid = grid
        self.rounding = rounding
        self.out_features, self.in_features = quantized.q.shape
        self.dtypes = {"q": quantized.q.dtype, "scale": quantized.scale.dtype}
        turn = quantized.scale.float().sign() / (1 << (grid.bits - 1))
        scale = quantized.scale.float() / turn
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            raise ValueError("a scale is zero or not finite")
        floats = grid.bits == FLOAT_BITS
        self.scale = None if floats else nn.Parameter(scale)
        self.register_buffer("turn", turn, persistent=False)
        self.register_buffer("zero", quantized.zero, persistent=False)
        self.register_buffer("mask", quantized.mask, persistent=False)
        self.register_buffer("outlier_columns", quantized.outlier_columns, persistent=False)
        self.outlier_weight = None
        outliers = quantized.outlier_weight
        if outliers is not None:
            self.dtypes["outlier_weight"] = outliers.dtype
            self.outlier_weight = nn.Parameter(outliers.to(torch.float32, copy=True))
        # A point of the grid over its step rounds back to its integer: both roundings together are far below a half.
        latent = dequantize(Quantized(quantized.q, quantized.scale, quantized.zero))
        if quantized.outlier_columns is not None:
            latent.index_fill_(1, quantized.outlier_columns.long(), 0)
        self.weight = nn.Parameter(latent)
        self.bias = None if bias is None else nn.Parameter(bias.to(torch.float32, copy=True))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., N]."""
        if self.rounding is not None:
            x = _Through.apply(x, self.rounding(x.detach()), None)
        return F.linear(x, self.effective_weight(), self.bias)

    def effective_weight(self) -> Tensor:
        """W, float32 [N, K], with gradients to all that moves."""
        if self.scale is None:
            rounded = self.weight.detach().to(self.dtypes["q"]).float()
            kept = rounded if self.mask is None else rounded.mul_(self.mask)
            return _Through.apply(self.weight, kept, self.mask)
        step = _Through.apply(self.scale * self.turn, self._stored_scale().float(), None)
        weight = _OnGrid.apply(self.weight, step, self.zero, self.mask, (self.grid.minimum, self.grid.maximum))
        if self.outlier_columns is not None:
            outliers = _Through.apply(self.outlier_weight, self._stored_outliers().float(), None)
            weight = weight.index_copy(1, self.outlier_columns.long(), outliers)
        return weight

    @torch.no_grad()
    def quantized(self) -> Quantized:
        """What the layer stands for now: `dequantize` of it is W, bit for bit."""
        if self.scale is None:
            q = self.weight.to(self.dtypes["q"])
            q = q if self.mask is None else q.mul_(self.mask)
            return Quantized(q, torch.ones_like(self.turn, dtype=self.dtypes["scale"]), mask=self.mask)
        scale = self._stored_scale()
        bounds = (self.grid.minimum, self.grid.maximum)
        points = _points(_ratio(self.weight, scale.float()).round_(), self.zero, bounds)
        if self.mask is not None:
            points.mul_(self.mask.view(points.shape))
        if self.zero is not None:
            points.add_(self.zero.unsqueeze(-1))
        q = points.to(self.dtypes["q"]).view(self.weight.shape)
        if self.outlier_columns is None:
            return Quantized(q, scale, self.zero, mask=self.mask)
        q.index_fill_(1, self.outlier_columns.long(), 0)
        return Quantized(q, scale, self.zero, self.outlier_columns, self._stored_outliers(), self.mask)

    def _stored_scale(self) -> Tensor:
        """The steps [N, G] in the dtype they are stored in: never zero, of the sign they were loaded with."""
        assert self.scale is not None
        limits = torch.finfo(self.dtypes["scale"])
        least = limits.smallest_normal * limits.eps * (1 << (self.grid.bits - 1))
        return (self.scale.detach().clamp(min=least) * self.turn).to(self.dtypes["scale"])

    def _stored_outliers(self) -> Tensor:
        assert self.outlier_weight is not None
        return self.outlier_weight.detach().to(self.dtypes["outlier_weight"], copy=True)


def _ratio(weight: Tensor, step: Tensor) -> Tensor:
    """`weight` [N, K] in steps [N, G]: float32 [N, G, K / G]."""
    return weight.view(*step.shape, -1) / step.unsqueeze(-1)


def _points(points: Tensor, zero: Tensor | None, bounds: tuple[int, int]) -> Tensor:
    """Integers [N, G, k], in place, to what the grid reaches: zero points stand for 0."""
    if zero is None:
        return points.clamp_(*bounds)
    offset = zero.unsqueeze(-1).to(points.dtype)
    return points.add_(offset).clamp_(*bounds).sub_(offset)


class _OnGrid(torch.autograd.Function):
    """(weight [N, K], step [N, G], zero, mask, bounds) -> clamp(round(weight / step)) * step, float32 [N, K].

    The gradient of `weight` is that of the result, except zero where it was clamped or is masked. That of a step is
    LSQ's: the sum over its group of (rounded - unrounded), or of the bound where clamped. Only inputs are kept: what
    backward needs beside them it computes again, since on a CPU four passes in the cache cost less than a copy.
    Written for few passes without branches: a masked fill by a random mask costs ten multiplications.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, step: Tensor, zero: Tensor | None, mask: Tensor | None, bounds: tuple[int, int]
    ) -> Tensor:
        ctx.save_for_backward(weight, step, zero, mask)
        ctx.bounds = bounds
        points = _points(_ratio(weight, step).round_(), zero, bounds).mul_(step.unsqueeze(-1))
        result = points.view(weight.shape)
        return result if mask is None else result.mul_(mask)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        weight, step, zero, mask = ctx.saved_tensors
        low, high = ctx.bounds[0] - 0.5, ctx.bounds[1] + 0.5
        ratio = _ratio(weight, step)
        gradient = gradients[0].reshape(ratio.shape)
        rounded = ratio.round()
        where = rounded if zero is None else rounded + zero.unsqueeze(-1)
        # What passes only between bounds: integers never touch them.
        inside = torch.ops.aten.hardtanh_backward
        to_weight = inside(gradient, where, low, high)
        if mask is not None:
            to_weight.mul_(mask.view(ratio.shape))
        if not ctx.needs_input_grad[1]:
            return to_weight.view(weight.shape), None, None, None, None
        ratio = inside(ratio, where, low, high)
        error = _points(rounded, zero, ctx.bounds).sub_(ratio)
        if mask is not None:
            error.mul_(mask.view(ratio.shape))
        return to_weight.view(weight.shape), error.mul_(gradient).sum(-1), None, None, None


class _Through(torch.autograd.Function):
    """(value, stand_in, mask) -> stand_in, whose gradient goes to `value`, except where the mask is False."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, stand_in: Tensor, mask: Tensor | None) -> Tensor:
        ctx.save_for_backward(mask)
        return stand_in

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return (gradients[0] if mask is None else gradients[0] * mask), None, None
