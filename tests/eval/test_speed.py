"""Timing: what a run is made of, in which order runs go, budgets and estimates. The clock is a fake throughout."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from compress.eval import speed
from compress.eval.speed import Bench, Runs, Workload, duration, estimate, measure, measure_within, middle, run
from tests.eval.fakes import Clock, TimedModel


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(speed, "perf_counter", clock.read)
    return clock


def quiet(stage: str, done: int, total: int) -> None: ...


def model(clock: Clock, token: float = 0.0, step: float = 0.0, log: list[str] | None = None, name: str = "") -> Any:
    return cast(Any, TimedModel(clock, token, step, log, name))


def test_a_run_is_a_prefill_and_steps_behind_it(clock: Clock) -> None:
    timed = model(clock, token=0.25, step=2.0)
    assert run(timed, Workload(batch=3, prompt=8, new=5)) == (3 * 8 * 0.25, 5 * 2.0)
    assert timed.calls == [(8, 0), *((1, length) for length in range(8, 13))]
    assert timed.caches == [(3, 13)]


def test_models_take_turns_and_the_first_round_is_not_counted(clock: Clock) -> None:
    log: list[str] = []
    pair = [model(clock, 1.0, 3.0, log, "a"), model(clock, 2.0, 4.0, log, "b")]
    found = measure(pair, Bench((1, 2), prompt=2, new=1, repeat=3).workloads, 3, quiet)
    assert found[0] == [Runs((2.0,) * 3, (3.0,) * 3), Runs((4.0,) * 3, (4.0,) * 3)]
    assert found[1] == [Runs((4.0,) * 3, (3.0,) * 3), Runs((8.0,) * 3, (4.0,) * 3)]
    # Two probes of each model and batch size come first.
    prefills = [entry for entry in log if entry.endswith(" 2")]
    assert prefills == ["a1 2", "b1 2"] * 4 + ["a2 2", "b2 2"] * 4


def test_progress_counts_estimated_seconds_up_to_the_total(clock: Clock) -> None:
    told: list[tuple[str, int, int]] = []
    measure([model(clock, 0.5, 1.0)], [Workload(1, 4, 2)], 2, lambda *event: told.append(event))
    assert told == [
        ("batch 1, warming up: seconds", 0, 12),
        ("batch 1, run 1 of 2: seconds", 4, 12),
        ("batch 1, run 2 of 2: seconds", 8, 12),
        ("timed: seconds", 12, 12),
    ]


def test_an_estimate_is_told_before_the_work(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "compress")
    measure([model(clock, 1.0, 1.0)], [Workload(1, 100, 20)], 5, quiet)
    assert "timing 5 runs of each: about 12 min" in caplog.text


def test_further_sequences_are_priced_as_tokens_of_a_prompt() -> None:
    assert estimate((0.5, 2.0), Workload(1, 10, 4)) == 10 * 0.5 + 4 * 2.0
    assert estimate((0.5, 2.0), Workload(3, 10, 4)) == 30 * 0.5 + 4 * (2.0 + 2 * 0.5)


def test_a_short_timing_is_whole_where_the_model_is_fast(clock: Clock) -> None:
    workload, (runs,) = measure_within([model(clock, 1e-5, 1e-4)], seconds=60.0)
    assert workload == Workload(1, speed.SHORT_PROMPT, speed.SHORT_STEPS)
    assert len(runs.prefill) == len(runs.decode) == speed.SHORT_RUNS


def test_a_slow_model_gets_a_short_prompt_and_few_steps_for_both(clock: Clock) -> None:
    slow, fast = model(clock, 0.02, 0.09), model(clock)
    workload, (runs, _) = measure_within([fast, slow], seconds=4.0)
    assert workload == Workload(1, 32, 2)
    assert 1 <= len(runs.prefill) <= speed.SHORT_RUNS


def test_a_spent_budget_ends_the_rounds_but_one_is_always_run(clock: Clock) -> None:
    workload, (runs,) = measure_within([model(clock, 10.0, 10.0)], seconds=0.1)
    assert (workload.prompt, workload.new, len(runs.decode)) == (8, 1, 1)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([5.0], None),
        ([1.0, 3.0], (1.5, 2.0, 2.5)),
        ([9.0, 1.0, 2.0, 3.0, 4.0], (2.0, 3.0, 4.0)),
        ([4.0, 1.0, 3.0, 2.0], (1.75, 2.5, 3.25)),
    ],
)
def test_median_and_quartiles(values: list[float], expected: tuple[float, float, float] | None) -> None:
    assert middle(values) == expected


def test_durations() -> None:
    assert [duration(seconds) for seconds in (3.2, 119, 600)] == ["3 s", "119 s", "10 min"]


def test_torch_gets_its_threads_back() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), speed.torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyError
    with speed.torch_threads(None):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before
