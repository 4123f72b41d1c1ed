"""The decoder against transformers: every family's logits, at once and step by step; attention by a slow oracle."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress.runtime import decoder as decoding
from compress.runtime.config import read_config
from compress.runtime.decoder import attend, frequencies, see
from compress.runtime.load import load_model
from tests.runtime.families import CASES, LLAMA3, Case, write_case
from tests.tiny import TINY

TOKENS = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
CONFIG = read_config({"model_type": "llama", **TINY}, Path("config.json"))


def off(got: Tensor, want: Tensor) -> float:
    """The largest difference, relative to the scale of `want`."""
    return ((got - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_logits_equal_transformers(tmp_path: Path, case: Case) -> None:
    folder = write_case(tmp_path / "model", case)
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits
    model = load_model(folder)
    assert model.engine == "lmpress" and model.notes == []
    assert off(model.logits(model.hidden(TOKENS)), want) < 1e-5

    cache = model.new_cache(2, 33)
    chunks = [TOKENS[:, :9], TOKENS[:, 9:20], *TOKENS[:, 20:].split(1, dim=1)]
    stepwise = torch.cat([model.hidden(chunk, cache) for chunk in chunks], dim=1)
    assert off(model.logits(stepwise), want) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_bfloat16_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    """Rounding happens where transformers rounds: norms, embedding scale, positions."""
    folder = write_case(tmp_path / "model", CASES[name])
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)(TOKENS).logits
    model = load_model(folder, dtype=torch.bfloat16)
    got = model.logits(model.hidden(TOKENS))
    assert got.dtype == torch.bfloat16
    assert off(got.float(), want.float()) < 0.02


def slow_attention(query: Tensor, key: Tensor, value: Tensor, window: int | None, cap: float | None) -> Tensor:
    """One query, one head, one key at a time."""
    batch, heads, count, _ = query.shape
    keys = key.shape[2]
    out = torch.zeros_like(query)
    for b in range(batch):
        for head in range(heads):
            source = head // (heads // key.shape[1])
            for t in range(count):
                last = keys - count + t
                first = 0 if window is None else max(0, last - window + 1)
                scores = key[b, source, first : last + 1] @ query[b, head, t] * CONFIG.query_scale
                if cap is not None:
                    scores = cap * torch.tanh(scores / cap)
                out[b, head, t] = scores.softmax(0) @ value[b, source, first : last + 1]
    return out


@pytest.mark.parametrize("cap", [None, 1.5], ids=["plain", "capped"])
@pytest.mark.parametrize("window", [None, 1, 4, 50], ids=["full", "self", "narrow", "wide"])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 7), (5, 1), (5, 6)])
def test_attention(
    monkeypatch: pytest.MonkeyPatch, start: int, count: int, window: int | None, cap: float | None
) -> None:
    monkeypatch.setattr(decoding, "QUERY_ROWS", 4)
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(2, 4, count, 16, generator=generator)
    key, value = torch.randn(2, 2, 2, start + count, 16, generator=generator)
    view = see(start, count, window, query.device)
    config = replace(CONFIG, attention_softcap=cap)
    got = attend(query, key[:, :, -view.keys :], value[:, :, -view.keys :], view, config)
    torch.testing.assert_close(got, slow_attention(query, key, value, window, cap), rtol=1e-4, atol=1e-6)


def test_llama3_frequencies() -> None:
    rope = read_config({"model_type": "llama", **TINY, "rope_parameters": LLAMA3}, Path("config.json")).ropes[0]
    plain = [500000.0 ** (-2 * i / 16) for i in range(8)]
    got = frequencies(rope, 16).tolist()
    for found, frequency in zip(got, plain, strict=True):
        wave = 2 * math.pi / frequency
        if wave < 64 / 4:
            assert found == pytest.approx(frequency)
        elif wave > 64 / 1:
            assert found == pytest.approx(frequency / 8)
        else:
            assert frequency / 8 < found < frequency
