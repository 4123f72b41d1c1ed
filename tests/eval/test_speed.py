"""Timing: medians, round-robin, budgets, and what the rows say of it."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
import torch

from compress.eval import speed
from compress.eval.speed import Pace, measure_pace, memory_bandwidth, round_robin, speed_rows
from tests.eval.fakes import FakeModel

CPU = torch.device("cpu")


def test_actions_take_turns() -> None:
    seen: list[str] = []
    times = round_robin([lambda: seen.append("a"), lambda: seen.append("b")], 3, 60.0, CPU)
    assert seen == list("ababab")
    assert [len(taken) for taken in times] == [3, 3]


def test_a_spent_budget_ends_the_rounds_but_one_is_always_run() -> None:
    times = round_robin([lambda: time.sleep(0.02)], 100, 0.05, CPU)
    assert 1 <= len(times[0]) <= 4
    assert len(round_robin([lambda: None], 100, 0.0, CPU)[0]) == 1


def test_decoding_continues_the_cache_behind_the_prompt() -> None:
    model = FakeModel(torch.zeros(100, 100))
    (pace,) = measure_pace([cast(Any, model)], seconds=5.0)
    assert (pace.prompt, pace.steps) == (speed.PROMPT, speed.DECODE_STEPS)
    lengths = [cached for tokens, cached in model.calls if tokens == 1 and cached >= 0]
    assert lengths == list(range(speed.PROMPT, speed.PROMPT + speed.DECODE_STEPS + 1))


def test_a_slow_model_gets_a_short_prompt() -> None:
    class Slow(FakeModel):
        def hidden(self, tokens: torch.Tensor, cache: Any = None) -> torch.Tensor:
            time.sleep(0.006 * tokens.shape[1])
            return super().hidden(tokens, cache)

    began = time.monotonic()
    (pace,) = measure_pace([cast(Any, Slow(torch.zeros(100, 100)))], seconds=0.6)
    assert pace.prompt in (8, 32)
    assert pace.prefill >= 0.006 * pace.prompt
    assert time.monotonic() - began < 4.0


def test_rows_state_rates_of_both_models_and_the_share_of_bandwidth() -> None:
    ours, theirs = Pace(100, 8, prefill=0.5, decode=0.02), Pace(100, 8, prefill=1.0, decode=0.01)
    prefill, decode = speed_rows([ours, theirs], bytes_per_token=10**8, bandwidth=10**10, characters_per_token=4.0)
    assert (prefill["tokens_per_s"], prefill["tokens_per_s_baseline"]) == (200.0, 100.0)
    assert (decode["tokens_per_s"], decode["tokens_per_s_baseline"]) == (50.0, 100.0)
    assert decode["chars_per_s"] == 200.0
    assert (decode["gbs"], decode["bandwidth_share"]) == (5.0, 0.5)
    assert prefill["gbs"] is None and prefill["bandwidth_share"] is None
    alone = speed_rows([ours], 10**8, 10**10, None)
    assert all(row["tokens_per_s_baseline"] is None and row["chars_per_s"] is None for row in alone)


def test_memory_bandwidth_is_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "COPY_BYTES", 1 << 24)
    assert 1e8 < memory_bandwidth(CPU) < 1e13
