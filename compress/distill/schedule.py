"""Learning rate over the steps of a training: a function of the step alone, so that resuming needs no state."""

from __future__ import annotations

from math import cos, pi
from typing import Literal

# The share of the steps over which wsd falls.
DECAY = 0.2


def learning_rate(step: int, steps: int, peak: float, warmup: float, kind: Literal["cosine", "wsd"]) -> float:
    """The rate of step `step` (from 0) of `steps`; ValueError outside of them.

    Over the first `warmup` (a share of the steps, rounded) it rises linearly to `peak`. Then `cosine` (arXiv
    1608.03983, without restarts) falls along half a cosine, and `wsd` (warm up, stay, decay: arXiv 2404.06395, section
    4) stays and falls linearly over the last fifth. It would be 0 at step `steps`, so no step is lost on a rate of 0.
    """
    if not 0 <= step < steps:
        raise ValueError(f"step {step} of {steps}")
    rising = round(warmup * steps)
    rise = (step + 1) / rising if step < rising else 1.0
    if kind == "wsd":
        return peak * min(rise, (steps - step) / max(1, round(DECAY * steps)))
    done = max(0, step - rising) / max(1, steps - rising)
    return peak * rise * (1 + cos(pi * done)) / 2
