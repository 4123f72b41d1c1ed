"""Speed: tokens per second of prefill and decode, and what share of the memory's bandwidth the weights moved at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from compress.runtime.load import Model

PROMPT = 128
DECODE_STEPS = 32
PREFILLS = 5
COPY_BYTES = 1 << 28


@dataclass(frozen=True)
class Pace:
    """Median seconds of a prefill of `prompt` tokens and of a token decoded behind it, over `steps` tokens. Batch 1."""

    prompt: int
    steps: int
    prefill: float
    decode: float


def measure_pace(models: Sequence[Model], seconds: float) -> list[Pace]:
    """The pace of each of `models`, within about `seconds` over all of them.

    Repetitions go round-robin over the models, so that a machine that slows down slows all of them alike. The prompt is
    shortened where a model is so slow that the prefills would not fit. Everything runs once before it is timed.
    """
    device = models[0].device
    tokens = (torch.arange(PROMPT, device=device) % 97)[None]
    prompt = min(_affordable_prompt(model, tokens, seconds / len(models) / 2) for model in models)
    tokens = tokens[:, :prompt]
    caches = [model.new_cache(1, prompt + DECODE_STEPS + 1) for model in models]
    for model, cache in zip(models, caches, strict=True):
        _next_logits(model, tokens, cache)
        _next_logits(model, tokens[:, :1], cache)
    prefills = round_robin([partial(_next_logits, model, tokens) for model in models], PREFILLS, seconds / 2, device)
    steps = [partial(_next_logits, model, tokens[:, :1], cache) for model, cache in zip(models, caches, strict=True)]
    decodes = round_robin(steps, DECODE_STEPS, seconds / 2, device)
    return [
        Pace(prompt, len(taken), median(runs), median(taken)) for runs, taken in zip(prefills, decodes, strict=True)
    ]


def _next_logits(model: Model, tokens: Tensor, cache: Any = None) -> Tensor:
    """What it takes to choose the token after `tokens` [1, T]."""
    return model.logits(model.hidden(tokens, cache)[:, -1])


def _affordable_prompt(model: Model, tokens: Tensor, seconds: float) -> int:
    """How many of `tokens` [1, T] to time: T, or T / 4 or T / 16 if two prefills of more do not fit into `seconds`."""
    length = tokens.shape[1] // 16
    while length < tokens.shape[1]:
        taken = round_robin([partial(_next_logits, model, tokens[:, :length])], 1, 0.0, model.device)[0][0]
        if 2 * taken > seconds:
            break
        length *= 4
    return length


def round_robin(
    actions: Sequence[Callable[[], Any]], repetitions: int, seconds: float, device: torch.device
) -> list[list[float]]:
    """Seconds of every run of every action, in turn: `repetitions` rounds, or fewer once `seconds` are up, but one."""
    times: list[list[float]] = [[] for _ in actions]
    deadline = perf_counter() + seconds
    for _ in range(repetitions):
        for action, taken in zip(actions, times, strict=True):
            _wait(device)
            start = perf_counter()
            action()
            _wait(device)
            taken.append(perf_counter() - start)
        if perf_counter() >= deadline:
            break
    return times


def _wait(device: torch.device) -> None:
    """Until the device has done what it was given. A CPU has when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy moves on `device`, reads and writes together: the median of five."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = source.clone()
    return 2 * COPY_BYTES / median(round_robin([partial(target.copy_, source)], 5, 5.0, device)[0])


def speed_rows(
    paces: Sequence[Pace], bytes_per_token: int, bandwidth: float, characters_per_token: float | None
) -> list[dict[str, Any]]:
    """The report's `speed` but for kernels, from the pace of the compressed model and, second, of a baseline.

    gbs: weights read per second of decoding, `bytes_per_token` for each token; prefill reuses weights, so it has none.
    """
    rows = []
    for phase, new in (("prefill", 0), ("decode", paces[0].steps)):
        rates = [pace.prompt / pace.prefill if phase == "prefill" else 1 / pace.decode for pace in paces]
        moved = bytes_per_token * rates[0] if phase == "decode" else None
        rows.append(
            {
                "phase": phase,
                "batch": 1,
                "prompt": paces[0].prompt,
                "new": new,
                "tokens_per_s": rates[0],
                "tokens_per_s_baseline": rates[1] if len(rates) > 1 else None,
                "chars_per_s": rates[0] * characters_per_token if characters_per_token else None,
                "gbs": moved / 1e9 if moved else None,
                "bandwidth_share": moved / bandwidth if moved else None,
            }
        )
    return rows
