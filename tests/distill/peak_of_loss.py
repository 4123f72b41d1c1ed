"""`python -m tests.distill.peak_of_loss TOKENS [ROWS]`: forward KL with a teacher beside, and what it takes.

One forward and backward pass of a head of 49,152 tokens over TOKENS hidden states of width 64; all at once without
ROWS. Prints as JSON the loss, the norms of the gradients, and the peak of resident bytes above what there was before.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from compress.distill import Target, forward_kl
from compress.distill.chunks import chunked_mean

VOCABULARY, WIDTH = 49_152, 64


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def main(tokens: int, rows: int | None = None) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, taught = torch.randn(2, tokens, WIDTH, generator=generator)
    head, teacher_head = torch.randn(2, VOCABULARY, WIDTH, generator=generator) / WIDTH**0.5 * 2
    hidden, head = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    labels, weights = torch.zeros(tokens, dtype=torch.int64), torch.rand(tokens, generator=generator)

    def score(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            teacher = taught[index] @ teacher_head.T
        return forward_kl.loss(logits, Target(labels[index], teacher), forward_kl.Config())

    # A first pass over a few positions brings in what torch loads on first use.
    chunked_mean(hidden[:8], lambda x: x @ head.T, [head], score, weights[:8]).backward()
    hidden.grad = head.grad = None
    before = resident("VmRSS")
    if rows is None:
        loss = (score(hidden @ head.T, torch.arange(tokens)) * weights).sum() / weights.sum()
    else:
        loss = chunked_mean(hidden, lambda x: x @ head.T, [head], score, weights, rows)
    loss.backward()
    assert hidden.grad is not None and head.grad is not None
    norms = [float(hidden.grad.norm()), float(head.grad.norm())]
    print(json.dumps({"loss": float(loss.detach()), "norms": norms, "bytes": resident("VmHWM") - before}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
