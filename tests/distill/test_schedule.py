"""Learning rates: their shape, their ends, and numbers worked out by hand."""

from __future__ import annotations

from math import cos, pi
from typing import Literal

import pytest

from compress.distill.schedule import learning_rate

Kind = Literal["cosine", "wsd"]
KINDS = pytest.mark.parametrize("kind", ["cosine", "wsd"])


def rates(steps: int, warmup: float, kind: Kind) -> list[float]:
    return [learning_rate(step, steps, 2.0, warmup, kind) for step in range(steps)]


def test_cosine() -> None:
    expected = [1.0, 2.0, *(1 + cos(pi * done / 8) for done in range(8))]
    assert rates(10, 0.2, "cosine") == pytest.approx(expected, abs=1e-12)


def test_wsd() -> None:
    expected = [0.5, 1.0, 1.5, *[2.0] * 14, 1.5, 1.0, 0.5]
    assert rates(20, 0.2, "wsd") == pytest.approx(expected, abs=1e-12)


@KINDS
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.5, 0.95])
def test_every_step_moves_and_none_too_far(kind: Kind, steps: int, warmup: float) -> None:
    found = rates(steps, warmup, kind)
    assert all(0 < rate <= 2.0 for rate in found)
    top = found.index(max(found))
    assert found[: top + 1] == sorted(found[: top + 1]) and found[top:] == sorted(found[top:], reverse=True)
    if warmup == 0:
        assert found[0] == 2.0
    if steps == 100:
        assert max(found) == 2.0 or (warmup > 0.8 and kind == "wsd")
        assert found[-1] < (0.2 if warmup > 0.8 else 0.11)


@KINDS
@pytest.mark.parametrize("step", [-1, 10])
def test_steps_beyond_the_end(kind: Kind, step: int) -> None:
    with pytest.raises(ValueError, match=f"step {step} of 10"):
        learning_rate(step, 10, 1.0, 0.1, kind)
