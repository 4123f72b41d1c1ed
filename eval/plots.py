"""Plots as inline SVG that takes its colours from the page, so that one drawing serves light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compress.eval.tables import by_kind, layer_kind

# Matplotlib draws in these stand-ins; each is replaced by the CSS variable of its meaning.
INK, FAINT = "#010101", "#020202"
SERIES = tuple(f"#0300{index:02x}" for index in range(1, 9))
VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)", **{c: f"var(--series-{i + 1})" for i, c in enumerate(SERIES)}}
STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Point:
    """One model in the plot of size against quality."""

    label: str
    nbytes: float
    ppl: float
    is_baseline: bool = False


def error_plot(layers: Sequence[Mapping[str, Any]]) -> str:
    """Signal over error in dB of each layer by block, one line per kind of layer. Empty without such figures."""
    measured = [row for row in layers if row["error_db"] is not None]
    if not measured:
        return ""

    def draw(axes: Any) -> None:
        for index, (kind, rows) in enumerate(by_kind(measured).items()):
            blocks = [layer_kind(row["name"])[0] for row in rows]
            dashes = ("-", "--", ":")[index // len(SERIES) % 3]
            style = {
                "color": SERIES[index % len(SERIES)],
                "linestyle": dashes,
                "marker": "o",
                "markersize": 3,
                "linewidth": 1.4,
            }
            axes.plot(blocks, [row["error_db"] for row in rows], label=kind.rpartition(".")[2], **style)
        axes.set_xlabel("block")
        axes.set_ylabel("signal over error, dB")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.figure.legend(loc="outside lower center", ncols=7, fontsize=10)

    return svg(draw, "error", "Signal over error of each layer, by block", width=8.0)


def divergence_plot(quality: Mapping[str, Any]) -> str:
    """Histogram of KL per token on a log axis, with mean, median and 99th percentile. Empty where not measured."""
    histogram = quality["kl_histogram"]
    if not histogram or not any(histogram["counts"]):
        return ""
    counts, edges = histogram["counts"], histogram["edges"]
    filled = [index for index, count in enumerate(counts) if count]
    shown = slice(filled[0], filled[-1] + 1)

    def draw(axes: Any) -> None:
        axes.set_xscale("log")
        axes.stairs(counts[shown], edges[shown.start : shown.stop + 1], fill=True, color=SERIES[0], alpha=0.85)
        marks = (
            ("median", "kl_median", "right", 1.0),
            ("mean", "kl_mean", "left", 1.0),
            ("99 %", "kl_p99", "left", 0.9),
        )
        for name, key, side, height in marks:
            if quality[key]:
                axes.axvline(quality[key], color=INK, linewidth=1, linestyle="--")
                place = {"xy": (quality[key], height), "xycoords": ("data", "axes fraction"), "ha": side, "va": "top"}
                axes.annotate(f" {name} {quality[key]:.2g} ", fontsize=9, **place)
        axes.set_xlabel("KL to the baseline, nats")
        axes.set_ylabel("tokens")

    return svg(draw, "divergence", "Histogram of the KL divergence per token")


def size_plot(points: Sequence[Point]) -> str:
    """Perplexity against bytes on disk, a labelled point per model. Empty with fewer than two points."""
    if len(points) < 2:
        return ""

    def draw(axes: Any) -> None:
        for point in points:
            color, marker = (INK, "s") if point.is_baseline else (SERIES[0], "o")
            axes.plot(point.nbytes / 1e6, point.ppl, marker=marker, color=color, markersize=7, linestyle="")
            axes.annotate(
                point.label,
                (point.nbytes / 1e6, point.ppl),
                (0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=9,
            )
        axes.margins(x=0.18, y=0.18)
        axes.set_xlabel("weights on disk, MB")
        axes.set_ylabel("perplexity (lower is better)")

    return svg(draw, "size", "Size on disk against perplexity")


def loss_plot(phases: Sequence[Mapping[str, Any]]) -> str:
    """Loss and held-out divergence over the steps of the last distillation. Empty where there was none."""
    trained = [row for row in phases if row["kind"] == "distill" and row.get("losses")]
    if not trained:
        return ""
    row = trained[-1]

    def draw(axes: Any) -> None:
        axes.plot(range(1, len(row["losses"]) + 1), row["losses"], color=SERIES[0], linewidth=1, label="loss")
        steps, divergences = zip(*row["held_out"], strict=True)
        axes.plot(steps, divergences, color=SERIES[1], marker="o", markersize=4, label="held-out KL to the teacher")
        axes.set_xlabel("step")
        axes.set_ylabel("nats per token")
        axes.set_ylim(bottom=0)
        axes.legend()

    return svg(draw, "loss", "Loss and held-out divergence over the steps of training")


def svg(draw: Any, name: str, title: str, width: float = 6.4) -> str:
    """What `draw(axes)` draws, `width` inches wide, as an SVG element titled `title` with ids of its own by `name`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(width, 4.0), layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _inline(buffer.getvalue(), name, title)


def _inline(drawing: str, name: str, title: str) -> str:
    """The svg element of a document by matplotlib: no prologue, no metadata, scalable, in the page's colours."""
    element = re.sub(r"<metadata>.*?</metadata>", "", drawing[drawing.index("<svg") :], flags=re.DOTALL)
    attributes = f'<svg role="img" aria-label="{title}" '
    element = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', rf'{attributes}viewBox="\1">', element, count=1)
    # Groups are called figure_1, axes_1 and so on in every drawing; a page with several needs them apart.
    element = re.sub(r'\bid="([\w.]+_\d+)"', rf'id="{name}-\1"', element)
    for color, variable in VARIABLES.items():
        element = element.replace(color, variable)
    return element.replace("xlink:href", "href").strip()
