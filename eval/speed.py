"""Speed: seconds that prefill and decoding take, measured in runs that go round-robin over the models compared."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from compress.eval.quality import Progress
from compress.runtime.load import Model

logger = logging.getLogger(__name__)

# The longest that a short timing takes on, and how often it repeats that.
SHORT_PROMPT = 128
SHORT_STEPS = 32
SHORT_RUNS = 5
# What is timed to say how long a whole bench will take.
PROBE_PROMPT = 64
PROBE_STEPS = 4


@dataclass(frozen=True)
class Workload:
    """`batch` sequences side by side: a prompt of `prompt` tokens each, then `new` tokens, one per step."""

    batch: int
    prompt: int
    new: int


@dataclass(frozen=True)
class Bench:
    """What to time: prompts and steps at each batch size, `repeat` times over."""

    batches: tuple[int, ...] = (1, 4, 16)
    prompt: int = 512
    new: int = 128
    repeat: int = 5

    @property
    def workloads(self) -> list[Workload]:
        return [Workload(batch, self.prompt, self.new) for batch in self.batches]


@dataclass(frozen=True)
class Runs:
    """Seconds that each run of one workload took: for the whole prompt, and for all steps behind it."""

    prefill: tuple[float, ...] = ()
    decode: tuple[float, ...] = ()


def measure(
    models: Sequence[Model], workloads: Sequence[Workload], repeat: int, progress: Progress
) -> list[list[Runs]]:
    """For each workload the runs of each model: `repeat` of them, in turn, after one of each that is not counted.

    Every run starts with an empty cache. `progress` counts in seconds, as estimated from a probe of each model.
    """
    estimates = [[estimate(pace, workload) for pace in map(probe, models)] for workload in workloads]
    total = (repeat + 1) * sum(map(sum, estimates))
    logger.info("timing %d runs of each: about %s", repeat, duration(total))
    done = 0.0
    found = []
    for workload, expected in zip(workloads, estimates, strict=True):
        runs = [Runs() for _ in models]
        for number in range(repeat + 1):
            for index, model in enumerate(models):
                stage = f"run {number} of {repeat}" if number else "warming up"
                progress(f"batch {workload.batch}, {stage}: seconds", round(done), math.ceil(total))
                taken = run(model, workload)
                done += expected[index]
                if number:
                    runs[index] = appended(runs[index], taken)
        found.append(runs)
    progress("timed: seconds", math.ceil(total), math.ceil(total))
    return found


def measure_within(models: Sequence[Model], seconds: float) -> tuple[Workload, list[Runs]]:
    """A short timing at batch 1 that takes about `seconds` over all models: what was timed, and each model's runs.

    Prompt and steps are cut where a model is so slow that they would not fit, and rounds end with the budget, but not
    before the first. Everything runs once before it is timed.
    """
    share = seconds / len(models) / 2
    workload = Workload(1, min(_affordable_prompt(model, share) for model in models), 1)
    step = max(run(model, workload)[1] for model in models)
    steps = int(share / SHORT_RUNS / step) if step else SHORT_STEPS
    workload = replace(workload, new=max(1, min(SHORT_STEPS, steps)))
    runs = [Runs() for _ in models]
    deadline = perf_counter() + seconds
    for number in range(SHORT_RUNS):
        if number and perf_counter() >= deadline:
            break
        runs = [appended(so_far, run(model, workload)) for so_far, model in zip(runs, models, strict=True)]
    return workload, runs


def duration(seconds: float) -> str:
    """Seconds, in minutes where there are several."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def appended(runs: Runs, taken: tuple[float, float]) -> Runs:
    """`runs` and one more."""
    return Runs((*runs.prefill, taken[0]), (*runs.decode, taken[1]))


def run(model: Model, workload: Workload) -> tuple[float, float]:
    """Seconds of one prefill, and of all decoding steps behind it, each up to the logits that choose the next token."""
    tokens = _tokens(model, workload.prompt).expand(workload.batch, -1)
    following = tokens[:, :1]
    cache = model.new_cache(workload.batch, workload.prompt + workload.new)

    def decode() -> None:
        for _ in range(workload.new):
            _next_logits(model, following, cache)

    prefill = timed(lambda: _next_logits(model, tokens, cache), model.device)
    return prefill, timed(decode, model.device)


def timed(action: Callable[[], Any], device: torch.device) -> float:
    """Seconds from the start of `action` until `device` has done what it was given."""
    _wait(device)
    start = perf_counter()
    action()
    _wait(device)
    return perf_counter() - start


def probe(model: Model) -> tuple[float, float]:
    """About how many seconds `model` takes for one token of a prompt, and for a decoding step at batch 1."""
    small = Workload(1, PROBE_PROMPT, PROBE_STEPS)
    run(model, small)
    prefill, decode = run(model, small)
    return prefill / PROBE_PROMPT, decode / PROBE_STEPS


def estimate(pace: tuple[float, float], workload: Workload) -> float:
    """Seconds that one run of `workload` will take about, at the `pace` of a probe.

    A further sequence in the batch is priced as a token of a prompt: its weights are read already.
    """
    token, step = pace
    return workload.batch * workload.prompt * token + workload.new * (step + (workload.batch - 1) * token)


def middle(values: Sequence[float]) -> tuple[float, float, float] | None:
    """(lower quartile, median, upper quartile) of `values`, interpolated linearly; None for fewer than two values."""
    if len(values) < 2:
        return None
    low, half, high = quantiles(values, n=4, method="inclusive")
    return low, half, high


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """torch on `count` threads for as long as the context lasts; as many as it has for None."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _tokens(model: Model, count: int) -> Tensor:
    """`count` ids [1, count] that every vocabulary has."""
    return (torch.arange(count, device=model.device) % min(97, model.config.vocab_size))[None]


def _next_logits(model: Model, tokens: Tensor, cache: Any) -> Tensor:
    """What it takes to choose the token after `tokens` [B, T]."""
    return model.logits(model.hidden(tokens, cache)[:, -1])


def _affordable_prompt(model: Model, seconds: float) -> int:
    """SHORT_PROMPT, or a quarter or a sixteenth of it, so that SHORT_RUNS prefills fit into about `seconds`."""
    length = SHORT_PROMPT // 16
    while length < SHORT_PROMPT:
        if SHORT_RUNS * run(model, Workload(1, length, 1))[0] > seconds:
            break
        length *= 4
    return length


def _wait(device: torch.device) -> None:
    """Until the device has done what it was given. A CPU has when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
