"""Quality on text: one pass over the windows gives perplexity of both models and the divergence between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.eval.divergence import summarize, token_divergence
from compress.eval.perplexity import bits_per_byte, chunk_tokens, log_probabilities, perplexity, perplexity_ratio
from compress.eval.text import Windows
from compress.runtime.load import Model

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Losses:
    """Per predicted token, float64 [W, T - 1] (agreement: bool); the last three are None without a baseline."""

    nll: Tensor
    nll_baseline: Tensor | None = None
    kl: Tensor | None = None
    agreement: Tensor | None = None


@torch.inference_mode()
def measure_losses(model: Model, baseline: Model | None, windows: Windows, progress: Progress) -> Losses:
    """Run the windows one by one through `model` and, where given, `baseline`, so that neither's logits pile up."""
    rows: list[tuple[Tensor, ...]] = []
    for index, tokens in enumerate(windows.tokens):
        tokens = tokens.to(model.device)
        rows.append(pair_losses(model, baseline, tokens) if baseline else (window_nll(model, tokens),))
        progress("reading", index + 1, len(windows.tokens))
    return Losses(*(torch.stack(column).cpu() for column in zip(*rows, strict=True)))


def window_nll(model: Model, tokens: Tensor) -> Tensor:
    """nll float64 [T - 1] of one window int64 [T]."""
    chunk = chunk_tokens(model.config.vocab_size)
    parts = log_probabilities(model, model.hidden(tokens[None, :-1])[0], chunk)
    return torch.cat([picked(part, targets) for part, targets in zip(parts, tokens[1:].split(chunk), strict=True)])


def pair_losses(model: Model, baseline: Model, tokens: Tensor) -> tuple[Tensor, ...]:
    """(nll, nll of the baseline, kl, agreement), each [T - 1], of one window int64 [T]."""
    shared = min(model.config.vocab_size, baseline.config.vocab_size)
    chunk = chunk_tokens(max(model.config.vocab_size, baseline.config.vocab_size))
    pair = [log_probabilities(one, one.hidden(tokens[None, :-1])[0], chunk) for one in (model, baseline)]
    columns: list[tuple[Tensor, ...]] = []
    for ours, theirs, targets in zip(*pair, tokens[1:].split(chunk), strict=True):
        nll, nll_baseline = picked(ours, targets), picked(theirs, targets)
        ours, theirs = narrow(ours, shared), narrow(theirs, shared)
        columns.append((nll, nll_baseline, *token_divergence(theirs, ours)))
    return tuple(torch.cat(column) for column in zip(*columns, strict=True))


def picked(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """-log p of each target: [n, V] and int64 [n] -> float64 [n]."""
    return -log_probabilities.gather(1, targets[:, None])[:, 0].double()


def narrow(log_probabilities: Tensor, width: int) -> Tensor:
    """Log-probabilities over the first `width` tokens alone, which sum to 1 again."""
    if log_probabilities.shape[1] == width:
        return log_probabilities
    return torch.log_softmax(log_probabilities[:, :width], dim=-1)


def quality_block(losses: Losses, windows: Windows) -> dict[str, Any]:
    """The report's `quality` from the losses measured on `windows`."""
    ppl, stderr = perplexity(losses.nll)
    block: dict[str, Any] = {
        "text": windows.name,
        "context": windows.tokens.shape[1],
        "tokens": windows.predicted,
        "ppl": ppl,
        "ppl_stderr": stderr,
        "bits_per_byte": bits_per_byte(losses.nll, windows.nbytes),
    }
    if losses.nll_baseline is None or losses.kl is None or losses.agreement is None:
        return block
    block["ppl_baseline"] = perplexity(losses.nll_baseline)[0]
    block["ppl_ratio"], block["ppl_ratio_stderr"] = perplexity_ratio(losses.nll, losses.nll_baseline)
    return block | summarize(losses.kl.flatten(), losses.agreement.flatten())
