"""What calibration remembers of a linear layer's inputs: token counts, channel magnitudes, and the Hessian X^T X."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.errors import InputError


@dataclass(frozen=True)
class InputStats:
    """Statistics of inputs x [tokens, K] shared by one or more linear layers. What no method asked for is None.

    absmax, mean_abs: float32 [K], of |x|. mean_square: float32 [K], of x^2. hessian: float32 [K, K], X^T X / tokens
    (half the Hessian of the layer's mean squared output error, GPTQ, arXiv 2210.17323, section 3). outlier_share:
    float32 [K], the share of tokens with |x| >= `threshold` (LLM.int8(), arXiv 2208.07339, section 3.2).
    """

    tokens: int
    absmax: Tensor | None = None
    mean_abs: Tensor | None = None
    mean_square: Tensor | None = None
    hessian: Tensor | None = None
    outlier_share: Tensor | None = None
    threshold: float | None = None

    @property
    def dead_channels(self) -> int:
        """Input channels that were zero in every token seen."""
        return 0 if self.absmax is None else int((self.absmax == 0).sum())

    def scaled(self, scale: Tensor) -> InputStats:
        """Statistics of x / scale [K]. The outlier share has no closed form and is dropped."""
        return replace(
            self,
            absmax=None if self.absmax is None else self.absmax / scale,
            mean_abs=None if self.mean_abs is None else self.mean_abs / scale,
            mean_square=None if self.mean_square is None else self.mean_square / scale.square(),
            hessian=None if self.hessian is None else self.hessian / scale / scale[:, None],
            outlier_share=None,
        )

    def permuted(self, order: Tensor) -> InputStats:
        """Statistics of x[order], for `order` int64 [K]."""
        return replace(
            self,
            absmax=None if self.absmax is None else self.absmax[order],
            mean_abs=None if self.mean_abs is None else self.mean_abs[order],
            mean_square=None if self.mean_square is None else self.mean_square[order],
            hessian=None if self.hessian is None else self.hessian[order][:, order],
            outlier_share=None if self.outlier_share is None else self.outlier_share[order],
        )


# Columns per strip of the Hessian: only the strips' parts on and above the diagonal are computed.
STRIP = 288


def _add_gram(total: Tensor, x: Tensor) -> None:
    """Add X^T X of `x` [tokens, K] to the upper triangle, by strips, of `total` [K, K]: little over half the work."""
    for start in range(0, len(total), STRIP):
        strip = slice(start, start + STRIP)
        total[strip, start:].addmm_(x[:, strip].T, x[:, start:])


def _mirror(total: Tensor) -> Tensor:
    """`total` [K, K] with its upper triangle, by strips, copied below the diagonal, in place."""
    for start in range(STRIP, len(total), STRIP):
        strip = slice(start, start + STRIP)
        total[strip, :start] = total[:start, strip].T
    return total


class StatsAccumulator:
    """Collects InputStats over batches. `needs` is a subset of mean_abs, mean_square, hessian, outliers (and absmax,
    which is always kept); `threshold` goes with outliers."""

    def __init__(self, name: str, needs: frozenset[str], threshold: float | None = None) -> None:
        self.name = name
        self.needs = needs
        self.threshold = threshold
        self.tokens = 0
        self.sums: dict[str, Tensor] = {}

    def add(self, inputs: Tensor) -> None:
        """Take in `inputs` [..., K]. Raises InputError where one is NaN or infinite, which spoils every statistic."""
        x = inputs.reshape(-1, inputs.shape[-1])
        magnitude = x.abs()
        peak = magnitude.amax(0).float()
        if not torch.isfinite(peak).all():
            channel = int((~torch.isfinite(peak)).nonzero()[0])
            raise InputError(
                f"{self.name}: input channel {channel} is NaN or infinite on the calibration tokens: check the "
                "source's weights, then the calibration text"
            )
        self.sums["absmax"] = torch.maximum(self.sums["absmax"], peak) if self.tokens else peak
        if "mean_abs" in self.needs:
            self._accumulate("mean_abs", magnitude.float().sum(0))
        if "mean_square" in self.needs:
            self._accumulate("mean_square", magnitude.float().square_().sum(0))
        if "outliers" in self.needs and self.threshold is not None:
            self._accumulate("outliers", (magnitude >= self.threshold).float().sum(0))
        if "hessian" in self.needs:
            if "hessian" not in self.sums:
                self.sums["hessian"] = torch.zeros(x.shape[1], x.shape[1], device=x.device)
            _add_gram(self.sums["hessian"], x.float())
        self.tokens += x.shape[0]

    def _accumulate(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if self.tokens else value

    def result(self) -> InputStats:
        """The statistics of all that was added; the accumulator gives up its buffers."""
        if not self.tokens:
            raise InputError(f"{self.name}: saw no token during calibration: its inputs were never computed")
        hessian = self.sums.pop("hessian", None)
        return InputStats(
            tokens=self.tokens,
            absmax=self.sums["absmax"],
            mean_abs=self.sums["mean_abs"] / self.tokens if "mean_abs" in self.sums else None,
            mean_square=self.sums["mean_square"] / self.tokens if "mean_square" in self.sums else None,
            hessian=None if hessian is None else _mirror(hessian).div_(self.tokens),
            outlier_share=self.sums["outliers"] / self.tokens if "outliers" in self.sums else None,
            threshold=self.threshold,
        )
