"""What losses are held against: float64 numbers, one token at a time."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log

import torch
from torch import Tensor

from compress.distill import TopK

ROWS, TOKENS = 7, 19
Compare = Callable[[list[float], list[float]], float]


def logits(seed: int, rows: int = ROWS, tokens: int = TOKENS, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(rows, tokens, generator=generator, dtype=torch.float64)


def probabilities(row: list[float], temperature: float = 1.0) -> list[float]:
    largest = max(row)
    powers = [exp((value - largest) / temperature) for value in row]
    return [power / sum(powers) for power in powers]


def kl(p: list[float], q: list[float]) -> float:
    """KL(p || q), where nothing is what p gives no weight, and what q alone gives none counts as exp(-10000)."""
    return sum(a * (log(a) - (log(b) if b > 0 else -1e4)) for a, b in zip(p, q, strict=True) if a > 0)


def lumped(p: list[float], tokens: list[int]) -> list[float]:
    """The probabilities of `tokens`, then that of all other tokens, if there are any."""
    rest = [p[token] for token in range(len(p)) if token not in tokens]
    return [p[token] for token in tokens] + ([sum(rest)] if rest else [])


def slow(student: Tensor, teacher: Tensor, compare: Compare, temperature: float = 1.0, k: int | None = None) -> Tensor:
    """temperature**2 * compare(teacher's, student's) per row of logits, both cut to the narrower; of k tokens and the
    rest where k is given."""
    width = min(student.shape[1], teacher.shape[1])
    found = []
    for ours, theirs in zip(student[:, :width].tolist(), teacher[:, :width].tolist(), strict=True):
        p, q = probabilities(theirs, temperature), probabilities(ours, temperature)
        if k is not None:
            tokens = sorted(range(width), key=lambda token: -p[token])[:k]
            p, q = lumped(p, tokens), lumped(q, tokens)
        found.append(temperature**2 * compare(p, q))
    return torch.tensor(found, dtype=torch.float64)


def top(teacher: Tensor, k: int) -> TopK:
    largest = teacher.log_softmax(-1).topk(k)
    return TopK(largest.values, largest.indices)


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether two tensors of one shape differ by at most `tolerance`, of the largest number expected or of 1."""
    assert found.shape == expected.shape
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))
