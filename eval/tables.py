"""A report as plain tables of text, which every renderer shows in its own way."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from compress.eval.phases import phase_tables
from compress.eval.report import figures
from compress.eval.table import NOT_MEASURED, Table, measured, number, percent, rate, storage, times


def report_tables(report: Mapping[str, Any]) -> list[Table]:
    """The tables of one report in reading order; those without a row are left out."""
    tables = [
        gate_table(report),
        quality_table(report),
        cost_table(report["costs"]),
        size_table(report),
        speed_table(report),
        kind_table(report["layers"]),
        miss_table(report["layers"]),
        *phase_tables(report["phases"]),
        Table("Fallbacks", ("layer", "reason"), by_reason(report["fallbacks"])),
        Table("Left alone", ("layer", "reason"), by_reason(report["skipped"])),
    ]
    return [table for table in tables if table.rows]


def gate_table(report: Mapping[str, Any]) -> Table:
    rows = tuple(
        (
            gate["expr"],
            "not measured" if gate["value"] is None else number(gate["value"], ".6g"),
            "passed" if gate["passed"] else "FAILED",
        )
        for gate in report["gates"]
    )
    failed = frozenset(index for index, gate in enumerate(report["gates"]) if not gate["passed"])
    return Table("Gates", ("gate", "measured", "verdict"), rows, failed=failed)


def quality_table(report: Mapping[str, Any]) -> Table:
    quality = report["quality"]
    if quality["ppl"] is None and not quality["tokens"]:
        return Table("Quality", (), ())
    rows = [
        ("perplexity", measured(quality["ppl"], quality["ppl_stderr"])),
        ("bits per byte", number(quality["bits_per_byte"])),
    ]
    if report["baseline"]:
        rows[1:1] = [
            ("perplexity of the baseline", number(quality["ppl_baseline"])),
            ("perplexity ratio", measured(quality["ppl_ratio"], quality["ppl_ratio_stderr"])),
        ]
        rows += [(f"KL to the baseline, {name}", number(quality[key])) for name, key in KL_ROWS]
        rows.append(("same most likely token", percent(quality["top1_agreement"])))
    extent = f"{quality['tokens']:,} tokens predicted in windows of {quality['context']}"
    note = f"{quality['text']}: {extent}; ± is one standard error, clustered by window; KL in nats per token"
    return Table("Quality", ("", "measured"), tuple(rows), note)


def cost_table(costs: Sequence[Mapping[str, Any]]) -> Table:
    """What the runtime rounds beyond the checkpoint's scheme, each against the same checkpoint without it."""
    rows = tuple(
        (
            row["name"],
            number(row["kl_mean"]),
            number(row["kl_p99"]),
            percent(row["top1_agreement"]),
            measured(row["ppl_ratio"], row["ppl_ratio_stderr"]),
        )
        for row in costs
    )
    columns = ("rounded at run time", "KL mean", "KL 99th percentile", "same most likely token", "perplexity ratio")
    note = (
        f"against this checkpoint without it, over {costs[0]['tokens']:,} tokens; part of what stands above"
        if costs
        else ""
    )
    return Table("Cost of the runtime", columns, rows, note)


KL_ROWS = (("mean", "kl_mean"), ("median", "kl_median"), ("99th percentile", "kl_p99"), ("largest", "kl_max"))


def size_table(report: Mapping[str, Any]) -> Table:
    size, memory = report["size"], report["memory"]
    ratio = figures(report)["size_ratio"]
    rows = (
        ("weights on disk", storage(size["bytes"])),
        ("weights of the baseline", storage(size["bytes_baseline"])),
        ("share of the baseline", percent(ratio)),
        ("bits per weight, compressed layers", number(size["bits_per_weight"])),
        ("bits per weight, whole model", number(size["bits_per_weight_all"])),
        ("key-value cache per token", storage(size["kv_bytes_per_token"])),
        ("peak resident memory", storage(memory["peak_rss"])),
        ("peak device memory", storage(memory["peak_device"])),
    )
    return Table("Size and memory", ("", "measured"), tuple(row for row in rows if row[1] != NOT_MEASURED))


def speed_table(report: Mapping[str, Any]) -> Table:
    """One row per phase and batch size. Columns that no row has a figure for are left out."""
    speed, host = report["speed"], report["host"]
    columns = {
        "phase": [row["phase"] for row in speed],
        "batch": [number(row["batch"]) for row in speed],
        "tokens/s": [rate(row["tokens_per_s"]) for row in speed],
        "IQR": [number(relative_spread(row), ".0%") for row in speed],
        "baseline": [rate(row["tokens_per_s_baseline"]) for row in speed],
        "speedup": [times(_speedup(row)) for row in speed],
        "chars/s": [rate(row["chars_per_s"]) for row in speed],
        "GB/s": [number(row["gbs"], ".3g") for row in speed],
        "of memory": [percent(row["bandwidth_share"]) for row in speed],
        "s": [number(row["seconds"], ".3g") for row in speed],
    }
    if not speed:
        return Table("Speed", tuple(columns), ())
    shown = {name: cells for name, cells in columns.items() if any(cell != NOT_MEASURED for cell in cells)}
    new = max(row["new"] or 0 for row in speed)
    runs = f", medians of {speed[0]['runs']} runs in turn" if speed[0]["runs"] else ""
    threads = f"{host['threads']} thread{'' if host['threads'] == 1 else 's'}"
    machine = f"{threads}, {host['gpu'] or host['cpu']}"
    bandwidth = f"memory is read at {number(host['memory_bandwidth_gbs'], '.3g')} GB/s"
    told = [f"prompt of {speed[0]['prompt']} tokens, {new} new{runs}", f"{machine}, {bandwidth}"]
    told += [kernel_note(speed, "kernel") or "no packed weights"]
    told += [f"baseline: {note}" for note in [kernel_note(speed, "kernel_baseline")] if note]
    return Table("Speed", tuple(shown), tuple(zip(*shown.values(), strict=True)), "; ".join(told))


def relative_spread(row: Mapping[str, Any]) -> float | None:
    """Interquartile range over median of a speed row's tokens per second."""
    spread = row["tokens_per_s_iqr"]
    return (spread[1] - spread[0]) / row["tokens_per_s"] if spread else None


def _speedup(row: Mapping[str, Any]) -> float | None:
    return row["tokens_per_s"] / row["tokens_per_s_baseline"] if row["tokens_per_s_baseline"] else None


def kernel_note(speed: Sequence[Mapping[str, Any]], key: str) -> str:
    """Which kernels multiplied which formats."""
    kernels = {name: kernel for row in speed for name, kernel in (row[key] or {}).items()}
    return ", ".join(f"{name} by {kernel}" for name, kernel in kernels.items())


def layer_kind(name: str) -> tuple[int, str]:
    """(block index, name with * for it): model.layers.3.mlp.up_proj -> 3, model.layers.*.mlp.up_proj."""
    match = re.search(r"(?<=\.)\d+(?=\.)", name)
    return (int(match[0]), f"{name[: match.start()]}*{name[match.end() :]}") if match else (0, name)


def in_block(kind: str) -> str:
    """A kind's name inside its block: model.layers.*.mlp.up_proj -> mlp.up_proj; lm_head stays."""
    return kind.partition("*.")[2] or kind


def by_kind(layers: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Layers by kind, in order of first appearance."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in layers:
        kinds.setdefault(layer_kind(row["name"])[1], []).append(row)
    return kinds


def kind_table(layers: Sequence[Mapping[str, Any]]) -> Table:
    """One row per kind of layer: the same projection in every block."""
    rows = []
    for kind, members in by_kind(layers).items():
        errors = sorted((row["error_db"], row["name"]) for row in members if row["error_db"] is not None)
        mean = sum(error for error, _ in errors) / len(errors) if errors else None
        worst = (number(errors[0][0], ".3g"), str(layer_kind(errors[0][1])[0])) if errors else (NOT_MEASURED,) * 2
        bits = sum(row["bits_per_weight"] for row in members) / len(members)
        names = (_distinct(members, key) for key in ("method", "scheme"))
        rows.append((in_block(kind), str(len(members)), *names, number(bits), number(mean, ".3g"), *worst))
    columns = ("layers", "n", "method", "scheme", "bits", "dB mean", "dB worst", "in block")
    measures = sorted({row["error_of"] for row in layers if row["error_of"]})
    note = "bits: stored per weight, scales included"
    if measures:
        note += f"; dB: signal over error of each layer's {' or '.join(measures)}, higher is better"
    return Table("Layers", columns, tuple(rows), note)


def miss_table(layers: Sequence[Mapping[str, Any]]) -> Table:
    """Layers whose inputs reached the outlier threshold outside the outlier columns, most misses first."""
    counted = [row for row in layers if row["outlier_misses"]]
    missed = sorted(
        (row for row in counted if row["outlier_misses"]["over"]), key=lambda row: -row["outlier_misses"]["over"]
    )
    rows = tuple(
        (
            row["name"],
            str(len(row["outlier_columns"] or [])),
            f"{row['outlier_misses']['over']:,}",
            percent(row["outlier_misses"]["over"] / max(1, row["outlier_misses"]["seen"])),
        )
        for row in missed[:12]
    )
    note = f"{len(missed)} of {len(counted)} layers saw activations over the threshold outside their outlier columns"
    return Table("Outliers that were missed", ("layer", "outlier columns", "activations", "share"), rows, note)


def layer_table(layers: Sequence[Mapping[str, Any]]) -> Table:
    """One row per layer."""
    rows = tuple(
        (
            row["name"],
            row["method"] or NOT_MEASURED,
            row["scheme"] or NOT_MEASURED,
            row["format"] or NOT_MEASURED,
            row["kernel"] or NOT_MEASURED,
            number(row["bits_per_weight"]),
            number(row["error_db"], ".3g"),
            number(row["damping"], ".3g"),
            number(row["tokens"], ","),
            number(row["seconds"], ".3g"),
            row["fallback"] or "",
            " ".join(map(str, row["outlier_columns"] or ())),
        )
        for row in layers
    )
    columns = (
        "layer",
        "method",
        "scheme",
        "format",
        "kernel",
        "bits",
        "dB",
        "damping",
        "tokens",
        "s",
        "fallback",
        "outlier columns",
    )
    return Table("Every layer", columns, rows)


def _distinct(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    return ", ".join(dict.fromkeys(str(row[key]) for row in rows if row[key])) or NOT_MEASURED


def by_reason(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], ...]:
    """Rows of (layers, reason): names of one kind that share a reason stand together."""
    reasons: dict[tuple[str, str], int] = {}
    for row in rows:
        key = (layer_kind(row["name"])[1], row["reason"])
        reasons[key] = reasons.get(key, 0) + 1
    return tuple(
        (f"{in_block(kind)} ({count})" if count > 1 else kind, reason) for (kind, reason), count in reasons.items()
    )
