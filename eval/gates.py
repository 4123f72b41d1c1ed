"""Gates: bounds on a report's figures, such as "ppl_ratio <= 1.05", for scripts and continuous integration."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from compress.errors import USAGE, InputError, did_you_mean
from compress.eval.report import build, figures

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
EXPRESSION = re.compile(r"\s*(\w+)\s*(<=|>=|==|!=|<|>)\s*([^\s<>=!]+)\s*")


@dataclass(frozen=True)
class Gate:
    """`figure` `comparison` `bound`, as in ppl_ratio <= 1.05. expr: as it was written."""

    expr: str
    figure: str
    comparison: str
    bound: float


def parse_gate(expr: str) -> Gate:
    """The gate that `expr` says. Raises InputError (usage) for one that is malformed or names no figure of a report."""
    match = EXPRESSION.fullmatch(expr)
    bound = _number(match[3]) if match else None
    if match is None or bound is None:
        raise InputError(f"gate: {expr!r} is not FIGURE COMPARISON NUMBER: write it like 'ppl_ratio <= 1.05'", USAGE)
    known = figures(build({}))
    if match[1] not in known:
        hint = did_you_mean(match[1], known)
        raise InputError(f"gate: {expr!r}: no figure is called {match[1]!r}{hint} Known: {', '.join(known)}", USAGE)
    return Gate(expr, match[1], match[2], bound)


def _number(text: str) -> float | None:
    """None for what is no number, NaN included: nothing compares to it."""
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value


def check_gates(gates: Iterable[Gate], report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The report's `gates`: each expression, the value found, and whether it passed; an unmeasured figure does not."""
    found = figures(report)
    return [
        {
            "expr": gate.expr,
            "value": found[gate.figure],
            "passed": _passes(found[gate.figure], gate),
        }
        for gate in gates
    ]


def _passes(value: float | None, gate: Gate) -> bool:
    # NaN would pass !=, and means that the model is broken.
    return value is not None and not math.isnan(value) and OPERATORS[gate.comparison](value, gate.bound)


def failures(report: Mapping[str, Any]) -> list[str]:
    """One line for each gate of `report` that failed."""
    lines = []
    for gate in report["gates"]:
        if not gate["passed"]:
            found = "no finite figure was measured" if gate["value"] is None else f"it is {gate['value']:.6g}"
            lines.append(f"gate failed: {gate['expr']}: {found}")
    return lines
