"""Tokens per second over batch size, of a model and its baseline, under the roof that memory's bandwidth sets."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from compress.eval.plots import FAINT, INK, SERIES, STYLE, svg

Rows = Sequence[Mapping[str, Any]]


class Colors(NamedTuple):
    """Of a drawing's lines, and of what is written beside them."""

    model: str
    baseline: str
    ink: str


PAGE = Colors(SERIES[0], SERIES[1], INK)
PAPER = Colors("#2a6fbf", "#c2571a", "#1b1b1a")
PAPER_FAINT = "#dcdcd7"


def speed_plot(speed: Rows, phase: str) -> str:
    """An SVG drawing of one phase for a page, in its colours. Empty with fewer than two batch sizes."""
    rows = _rows(speed, phase)
    if len(rows) < 2:
        return ""
    return svg(lambda axes: draw(axes, rows, PAGE), phase, f"Tokens per second of {phase} over batch size")


def speed_image(speed: Rows) -> bytes | None:
    """Both phases side by side as a PNG on white, for where no page can be shown. None as for `speed_plot`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    phases = [phase for phase in ("prefill", "decode") if len(_rows(speed, phase)) > 1]
    if not phases:
        return None
    shades = {INK: PAPER.ink, FAINT: PAPER_FAINT}
    style = {key: shades.get(value, value) if isinstance(value, str) else value for key, value in STYLE.items()}
    with rc_context(style):
        figure = Figure(figsize=(6.4 * len(phases), 4.0), layout="constrained")
        for axes, phase in zip(figure.subplots(1, len(phases), squeeze=False)[0], phases, strict=True):
            draw(axes, _rows(speed, phase), PAPER)
            axes.set_title(phase)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def draw(axes: Any, rows: Rows, colors: Colors) -> None:
    """Lines with interquartile ranges of the model and its baseline, and the roof of each as a dashed line."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    batches = [row["batch"] for row in rows]
    series = (("this model", "", colors.model, "o"), ("baseline", "_baseline", colors.baseline, "s"))
    for label, suffix, color, marker in series:
        rates = [row[f"tokens_per_s{suffix}"] for row in rows]
        if None in rates:
            continue
        low, high = zip(*(_range(row, suffix) for row in rows), strict=True)
        bars = [
            [rate - least for rate, least in zip(rates, low, strict=True)],
            [most - rate for rate, most in zip(rates, high, strict=True)],
        ]
        axes.errorbar(batches, rates, yerr=bars, color=color, marker=marker, markersize=4, capsize=3, label=label)
        roofs = [roof(row, suffix) for row in rows]
        if None not in roofs:
            label = f"{label}, bandwidth roof"
            axes.plot(batches, roofs, color=color, linestyle="--", linewidth=1, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.minorticks_off()
    axes.set_xlabel("sequences side by side")
    axes.set_ylabel("tokens per second")
    axes.legend(fontsize=9)


def roof(row: Mapping[str, Any], suffix: str = "") -> float | None:
    """Tokens per second of a speed row if it moved its bytes at the whole bandwidth; suffix: "", or "_baseline"."""
    share = row[f"bandwidth_share{suffix}"]
    return row[f"tokens_per_s{suffix}"] / share if share else None


def _rows(speed: Rows, phase: str) -> Rows:
    """The rows of `phase` by batch size."""
    return sorted((row for row in speed if row["phase"] == phase), key=lambda row: row["batch"])


def _range(row: Mapping[str, Any], suffix: str) -> Sequence[float]:
    rate = row[f"tokens_per_s{suffix}"]
    return row[f"tokens_per_s_iqr{suffix}"] or (rate, rate)
