"""Gates: what passes, what fails, and what is refused before anything is measured."""

from __future__ import annotations

import pytest

from compress.errors import USAGE, InputError
from compress.eval.gates import check_gates, failures, parse_gate
from compress.eval.report import build

REPORT = build({"quality": {"ppl_ratio": 1.05, "kl_mean": float("nan")}, "size": {"bits_per_weight": 4.25}})


@pytest.mark.parametrize(
    ("expr", "passed"),
    [
        ("ppl_ratio<=1.05", True),
        ("ppl_ratio < 1.05", False),
        (" ppl_ratio>=1.05 ", True),
        ("ppl_ratio > 1.05", False),
        ("fallbacks == 0", True),
        ("fallbacks != 0", False),
        ("bits_per_weight<=4.6", True),
        ("bits_per_weight <= 425e-2", True),
        ("ppl <= 1e9", False),
        ("ppl != 1", False),
        ("kl_mean < 1", False),
        ("kl_mean != 1", False),
    ],
)
def test_verdicts(expr: str, passed: bool) -> None:
    (verdict,) = check_gates([parse_gate(expr)], REPORT)
    assert verdict["expr"] == expr
    assert verdict["passed"] is passed


def test_each_failure_is_a_line_with_the_figure() -> None:
    exprs = ["ppl_ratio <= 1.01", "ppl <= 30", "fallbacks == 0"]
    report = {"gates": check_gates([parse_gate(expr) for expr in exprs], REPORT)}
    assert failures(report) == [
        "gate failed: ppl_ratio <= 1.01: it is 1.05",
        "gate failed: ppl <= 30: no finite figure was measured",
    ]


@pytest.mark.parametrize("expr", ["ppl", "ppl <= ", "<= 3", "ppl = 3", "ppl <= x", "ppl <= 3 or 1", "ppl <= nan", ""])
def test_malformed_gates_are_usage_errors(expr: str) -> None:
    with pytest.raises(InputError, match="write it like") as caught:
        parse_gate(expr)
    assert caught.value.exit_code == USAGE


def test_an_unknown_figure_is_a_usage_error_with_the_nearest_word() -> None:
    with pytest.raises(InputError, match="did you mean 'ppl_ratio'") as caught:
        parse_gate("ppl_ration <= 1.05")
    assert caught.value.exit_code == USAGE
