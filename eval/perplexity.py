"""Perplexity with its standard error, and log-probabilities computed in chunks of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, log

import torch
from torch import Tensor

from compress.runtime.load import Model

# Elements of one chunk of logits: 32 MB in float32, whatever the vocabulary.
CHUNK_ELEMENTS = 1 << 23


def log_probabilities(model: Model, hidden: Tensor, chunk: int) -> Iterator[Tensor]:
    """hidden [T, D] -> float32 [<= chunk, V] log-probabilities, chunk by chunk, so that [T, V] never exists."""
    for part in hidden.split(chunk):
        yield torch.log_softmax(model.logits(part).float(), dim=-1)


def chunk_tokens(vocabulary: int) -> int:
    """Tokens per chunk of logits for a vocabulary of that size."""
    return max(1, CHUNK_ELEMENTS // vocabulary)


def perplexity(nll: Tensor) -> tuple[float, float | None]:
    """Perplexity and its standard error from float64 nll [W, T], negative log-likelihoods in nats, by window.

    Tokens of one window share context and topic, so their errors are not independent. The mean's standard error is
    therefore clustered by window: with equal windows, the standard deviation of the window means over sqrt(W). The
    delta method carries it through exp: se(ppl) = ppl * se(mean nll). None with a single window.
    """
    mean = float(nll.mean())
    ppl = float("inf") if mean > 709 else exp(mean)  # float64 ends at exp(709.8)
    if nll.shape[0] < 2:
        return ppl, None
    return ppl, ppl * float(nll.mean(dim=1).std(unbiased=True)) / nll.shape[0] ** 0.5


def perplexity_ratio(nll: Tensor, nll_baseline: Tensor) -> tuple[float, float | None]:
    """ppl / ppl_baseline and its standard error, from the same windows [W, T] of both models.

    Paired: clustered by window over the differences of nll, it is much smaller than the error of either perplexity.
    """
    return perplexity(nll - nll_baseline)


def bits_per_byte(nll: Tensor, nbytes: int) -> float:
    """Total nll (nats) in bits, per UTF-8 byte of the predicted text: comparable across tokenizers."""
    return float(nll.sum()) / log(2) / nbytes
