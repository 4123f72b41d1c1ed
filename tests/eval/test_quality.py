"""One pass over the windows: losses against a hand computation, chunked logits, unequal vocabularies."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from compress.eval import perplexity
from compress.eval.quality import measure_losses, quality_block
from compress.eval.text import Windows
from tests.eval.fakes import FakeModel

VOCABULARY = 11


def table(seed: int, width: int = VOCABULARY) -> torch.Tensor:
    return 2 * torch.randn(VOCABULARY, width, generator=torch.Generator().manual_seed(seed))


def windows(rows: int = 3, length: int = 9) -> Windows:
    tokens = torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(5))
    return Windows("text.txt", tokens, nbytes=rows * (length - 1), characters=rows * (length - 1))


def measure(model: FakeModel, baseline: FakeModel | None = None) -> Any:
    return measure_losses(cast(Any, model), cast(Any, baseline), windows(), lambda *_: None)


def test_every_token_but_the_first_of_a_window_is_predicted() -> None:
    scores = table(0)
    losses = measure(FakeModel(scores))
    for row, tokens in enumerate(windows().tokens.tolist()):
        for index, (given, wanted) in enumerate(zip(tokens[:-1], tokens[1:], strict=True)):
            slow = -torch.log_softmax(scores[given].double(), 0)[wanted].item()
            assert losses.nll[row, index].item() == pytest.approx(slow, rel=1e-5)
    assert losses.kl is None


def test_logits_are_held_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measure(FakeModel(table(0)), FakeModel(table(1)))
    monkeypatch.setattr(perplexity, "CHUNK_ELEMENTS", 3 * VOCABULARY)
    model = FakeModel(table(0))
    chunked = measure(model, FakeModel(table(1)))
    assert model.widest == 3
    for name in ("nll", "nll_baseline", "kl", "agreement"):
        assert torch.equal(getattr(whole, name), getattr(chunked, name))


def test_a_model_against_itself_loses_nothing() -> None:
    block = quality_block(measure(FakeModel(table(0)), FakeModel(table(0))), windows())
    assert (block["ppl_ratio"], block["kl_max"], block["top1_agreement"]) == (1.0, 0.0, 1.0)
    assert block["ppl"] == block["ppl_baseline"]
    assert (block["tokens"], block["context"]) == (24, 9)


def test_the_baseline_is_the_first_argument_of_the_divergence() -> None:
    ours, theirs = table(0), table(1)
    losses = measure(FakeModel(ours), FakeModel(theirs))
    p, q = (torch.log_softmax(scores.double(), dim=-1) for scores in (theirs, ours))
    kl = (p.exp() * (p - q)).sum(dim=-1)[windows().tokens[:, :-1]]
    assert torch.allclose(losses.kl, kl, rtol=1e-4)


@pytest.mark.parametrize("padded", ["model", "baseline"])
def test_padded_vocabularies_are_cut_to_the_smaller(padded: str) -> None:
    """Rows that pad an embedding get some probability; the divergence over the shared tokens must not see it."""
    scores = table(0)
    wide = torch.cat([scores, torch.full((VOCABULARY, 5), 1.0)], dim=1)
    pair = (wide, scores) if padded == "model" else (scores, wide)
    losses = measure(*(FakeModel(each) for each in pair))
    assert losses.kl.max() < 1e-5
    assert bool(losses.agreement.float().mean() == 1.0)
