"""A report as one self-contained HTML page: inline style and drawings, no script, no request to anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from compress.eval.plots import Point, divergence_plot, error_plot, loss_plot, size_plot
from compress.eval.report import figures
from compress.eval.speed_plot import speed_plot
from compress.eval.table import NOT_MEASURED, number, percent, times
from compress.eval.tables import gate_table, layer_table, report_tables


def report_page(report: Mapping[str, Any]) -> str:
    """The page of one report, gates at its top."""
    gates = gate_table(report)
    layers = layer_table(report["layers"])
    drawings = (
        ("Size against quality", size_plot(quality_points([("this model", report)]))),
        ("Divergence per token", divergence_plot(report["quality"])),
        ("Training", loss_plot(report["phases"])),
        ("Decoding over batch size", speed_plot(report["speed"], "decode")),
        ("Prefill over batch size", speed_plot(report["speed"], "prefill")),
        ("Error by layer", error_plot(report["layers"])),
    )
    return page(
        title=str(report["model"]),
        subtitle=_subtitle(report),
        gates=gates if gates.rows else None,
        headline=[(name, value) for name, value in headline(report) if value != NOT_MEASURED],
        tables=[table for table in report_tables(report) if table.title != gates.title],
        drawings=[(name, drawing) for name, drawing in drawings if drawing],
        folded=[layers] if layers.rows else [],
        notes=report["notes"],
    )


def page(**content: Any) -> str:
    """The template filled with `content`; all text is escaped, drawings alone are markup."""
    from jinja2 import Environment, StrictUndefined

    source = files("compress.eval").joinpath("templates/report.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source).render(**content)


def headline(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The few figures that sum a report up."""
    found = figures(report)
    return [
        ("of the baseline's size", percent(found["size_ratio"])),
        ("bits per weight", number(found["bits_per_weight"], ".3g")),
        ("perplexity", number(found["ppl"])),
        ("perplexity ratio", number(found["ppl_ratio"])),
        ("mean KL", number(found["kl_mean"], ".3g")),
        ("same top token", percent(found["top1_agreement"])),
        ("decode speed", times(found["decode_speedup"])),
    ]


def quality_points(reports: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Point]:
    """Points of size against perplexity: each report's model, and each different baseline once."""
    points: list[Point] = []
    for label, report in reports:
        size, quality = report["size"], report["quality"]
        if size["bytes"] and quality["ppl"]:
            points.append(Point(label, size["bytes"], quality["ppl"]))
        baseline = Point("baseline", size["bytes_baseline"] or 0, quality["ppl_baseline"] or 0, is_baseline=True)
        if baseline.nbytes and baseline.ppl and baseline not in points:
            points.append(baseline)
    return points


def _subtitle(report: Mapping[str, Any]) -> str:
    parts = [f"against {report['baseline']}" if report["baseline"] else "no baseline", str(report["created"])]
    parts += [f"{name} {version}" for name, version in report["versions"].items() if version]
    if report["recipe_sha256"]:
        parts.append(f"recipe {report['recipe_sha256'][:12]}")
    return " · ".join(parts)
