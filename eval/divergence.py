"""KL divergence and top-1 agreement of two models over the same tokens."""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor

# Histogram of KL in nats: edges from 1e-8 to 1e2, six bins per decade. Values beyond fall into the outermost bins.
EDGES = torch.logspace(-8, 2, 61, dtype=torch.float64)


def token_divergence(baseline: Tensor, compressed: Tensor) -> tuple[Tensor, Tensor]:
    """KL(baseline || compressed) in nats, float64 [n], and whether both rank the same token first, bool [n].

    Both are float32 log-probabilities [n, V]. Sums over the vocabulary are in float64. Rounding can leave a tiny
    negative number where the truth is 0; such values are set to 0.
    """
    kl = (baseline.exp() * (baseline - compressed)).sum(dim=-1, dtype=torch.float64)
    return torch.where(kl < 0, 0.0, kl), baseline.argmax(dim=-1) == compressed.argmax(dim=-1)


def summarize(kl: Tensor, agreement: Tensor) -> dict[str, Any]:
    """Mean, median, 99th percentile and maximum of kl [n], share of agreement [n], and the histogram of kl."""
    return {
        "kl_mean": float(kl.mean()),
        "kl_median": percentile(kl, 0.5),
        "kl_p99": percentile(kl, 0.99),
        "kl_max": float(kl.max()),
        "top1_agreement": float(agreement.double().mean()),
        "kl_histogram": histogram(kl),
    }


def percentile(values: Tensor, share: float) -> float:
    """The smallest of the values that at least `share` of them do not exceed (torch.quantile refuses long tensors)."""
    return float(values.sort().values[max(0, ceil(share * values.numel()) - 1)])


def histogram(kl: Tensor) -> dict[str, list[float] | list[int]]:
    """Counts of kl between EDGES. NaN is counted nowhere."""
    known = kl[~kl.isnan()].clamp(float(EDGES[0]), float(EDGES[-1]))
    bins = torch.bucketize(known, EDGES[1:-1], right=True)
    counts = torch.bincount(bins, minlength=len(EDGES) - 1)
    return {"edges": [float(f"{edge:.6g}") for edge in EDGES.tolist()], "counts": counts.tolist()}
