"""Reports side by side: which figures they share, and what forbids comparing them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.eval.plots import size_plot
from compress.eval.render_html import page, quality_points
from compress.eval.report import figures, read_report
from compress.eval.table import NOT_MEASURED, Table, measured, number, percent, rate, storage, times

Labelled = tuple[str, Mapping[str, Any]]

ROWS: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
    ("weights on disk", "bytes", storage),
    ("share of the baseline", "size_ratio", percent),
    ("bits per weight, compressed layers", "bits_per_weight", number),
    ("bits per weight, whole model", "bits_per_weight_all", number),
    ("perplexity", "ppl", number),
    ("perplexity ratio", "ppl_ratio", number),
    ("bits per byte", "bits_per_byte", number),
    ("KL to the baseline, mean", "kl_mean", number),
    ("KL to the baseline, 99th percentile", "kl_p99", number),
    ("same most likely token", "top1_agreement", percent),
    ("worst layer, signal over error in dB", "error_db_min", number),
    ("prefill, tokens/s", "prefill_tokens_per_s", rate),
    ("decode, tokens/s", "decode_tokens_per_s", rate),
    ("decode, speedup", "decode_speedup", times),
    ("peak resident memory", "peak_rss", storage),
    ("fallbacks", "fallbacks", number),
)
ERRORS = {"ppl": "ppl_stderr", "ppl_ratio": "ppl_ratio_stderr"}


def read_reports(paths: Sequence[Path]) -> list[Labelled]:
    """Reports with labels that tell them apart: the shortest tail of each path that no other shares."""
    folders = [path.resolve() if path.is_dir() else path.resolve().parent for path in paths]
    depth = 1
    while len({folder.parts[-depth:] for folder in folders}) < len(folders) and depth < max(
        len(f.parts) for f in folders
    ):
        depth += 1
    return [(str(Path(*folder.parts[-depth:])), read_report(path)) for folder, path in zip(folders, paths, strict=True)]


def comparison(reports: Sequence[Labelled]) -> Table:
    """One column per report; figures that none has measured are left out."""
    found = [figures(report) for _, report in reports]
    rows = []
    for title, key, form in ROWS:
        cells = [measured(one[key], one[ERRORS[key]]) if key in ERRORS else form(one[key]) for one in found]
        if any(cell != NOT_MEASURED for cell in cells):
            rows.append((title, *cells))
    gates = [_gates(report) for _, report in reports]
    rows.append(("gates", *gates))
    return Table("Side by side", ("", *(label for label, _ in reports)), tuple(rows))


def _gates(report: Mapping[str, Any]) -> str:
    failed = sum(not gate["passed"] for gate in report["gates"])
    return f"{failed} of {len(report['gates'])} failed" if failed else f"{len(report['gates'])} passed"


def caveats(reports: Sequence[Labelled]) -> list[str]:
    """What makes figures of these reports incomparable, a line each."""
    checks: tuple[tuple[str, Callable[[Mapping[str, Any]], Any]], ...] = (
        (
            "texts, windows or tokens: perplexity and KL are not comparable",
            lambda r: [r["quality"][k] for k in ("text", "context", "tokens")],
        ),
        ("baselines: ratios and KL are not comparable", lambda r: r["baseline"]),
        ("hosts or threads: speeds are not comparable", lambda r: [r["host"][k] for k in ("cpu", "gpu", "threads")]),
    )
    return [f"different {what}" for what, of in checks if any(of(report) != of(reports[0][1]) for _, report in reports)]


def comparison_page(reports: Sequence[Labelled]) -> str:
    """The comparison as one self-contained HTML page."""
    drawing = size_plot(quality_points(reports))
    return page(
        title="Side by side",
        subtitle=", ".join(label for label, _ in reports),
        gates=None,
        headline=[],
        tables=[comparison(reports)],
        drawings=[("Size against quality", drawing)] if drawing else [],
        folded=[],
        notes=caveats(reports),
    )


def comparison_document(reports: Sequence[Labelled]) -> dict[str, Any]:
    """The comparison as plain values: every flat figure of each report."""
    return {
        "schema_version": 1,
        "reports": [
            {"label": label, "model": report["model"], "baseline": report["baseline"], "figures": figures(report)}
            for label, report in reports
        ],
        "caveats": caveats(reports),
    }
