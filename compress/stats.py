"""What calibration remembers of a linear layer's inputs: token counts, channel magnitudes, and the Hessian X^T X."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.errors import InputError

STATISTICS = frozenset({"absmax", "mean_abs", "hessian", "outliers"})


@dataclass(frozen=True)
class InputStats:
    """Statistics of inputs x [tokens, K] shared by one or more linear layers. Fields that no method asked for are None.

    absmax, mean_abs: float32 [K], of |x|. hessian: float32 [K, K], X^T X / tokens (half the Hessian of the layer's mean
    squared output error, GPTQ, arXiv 2210.17323, section 3). outlier_share: float32 [K], the share of tokens with
    |x| >= `threshold` (LLM.int8(), arXiv 2208.07339, section 3.2).
    """

    tokens: int
    absmax: Tensor | None = None
    mean_abs: Tensor | None = None
    hessian: Tensor | None = None
    outlier_share: Tensor | None = None
    threshold: float | None = None

    @property
    def dead_channels(self) -> int:
        """Input channels that were zero in every token seen."""
        energy = self.hessian.diagonal() if self.hessian is not None else self.absmax
        return 0 if energy is None else int((energy == 0).sum())

    def scaled(self, scale: Tensor) -> InputStats:
        """Statistics of x / scale [K]. The outlier share has no closed form and is dropped."""
        return replace(
            self,
            absmax=None if self.absmax is None else self.absmax / scale,
            mean_abs=None if self.mean_abs is None else self.mean_abs / scale,
            hessian=None if self.hessian is None else self.hessian / scale / scale[:, None],
            outlier_share=None,
        )


class StatsAccumulator:
    """Collects InputStats over batches. `needs` is a subset of STATISTICS; `threshold` goes with "outliers"."""

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
        if "absmax" in self.needs:
            self.sums["absmax"] = torch.maximum(self.sums["absmax"], peak) if self.tokens else peak
        if "mean_abs" in self.needs:
            self._accumulate("mean_abs", magnitude.float().sum(0))
        if "outliers" in self.needs and self.threshold is not None:
            self._accumulate("outliers", (magnitude >= self.threshold).float().sum(0))
        if "hessian" in self.needs:
            if "hessian" not in self.sums:
                self.sums["hessian"] = torch.zeros(x.shape[1], x.shape[1], device=x.device)
            self.sums["hessian"].addmm_(x.T.float(), x.float())
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
            absmax=self.sums.get("absmax"),
            mean_abs=self.sums["mean_abs"] / self.tokens if "mean_abs" in self.sums else None,
            hessian=None if hessian is None else hessian.div_(self.tokens),
            outlier_share=self.sums["outliers"] / self.tokens if "outliers" in self.sums else None,
            threshold=self.threshold,
        )
