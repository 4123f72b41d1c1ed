"""report.json: what was measured, under fixed keys. A figure that was not measured is null, never absent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compress.checkpoint.strict_json import read_object
from compress.errors import InputError

SCHEMA_VERSION = 1
Keys = tuple[str, ...]
TOP = (
    "schema_version", "model", "baseline", "recipe_sha256", "created", "versions", "host", "size", "quality",
    "tasks", "recovery", "costs", "speed", "memory", "layers", "phases", "fallbacks", "skipped", "gates", "notes"
)  # fmt: skip
HOST = ("cpu", "threads", "memory_bandwidth_gbs", "gpu")
SIZE = ("bytes", "bytes_baseline", "bits_per_weight", "bits_per_weight_all", "kv_bytes_per_token")
QUALITY = (
    "text", "context", "tokens", "ppl", "ppl_stderr", "ppl_baseline", "ppl_ratio", "ppl_ratio_stderr",
    "bits_per_byte", "kl_mean", "kl_median", "kl_p99", "kl_max", "kl_histogram", "top1_agreement"
)  # fmt: skip
SPEED = (
    "phase", "batch", "prompt", "new", "tokens_per_s", "tokens_per_s_baseline", "chars_per_s", "gbs",
    "bandwidth_share", "kernel"
)  # fmt: skip
# Since the first release: what reports written before do not have, and is null there.
SPEED_ADDED = (
    "runs", "seconds", "seconds_baseline", "tokens_per_s_iqr", "tokens_per_s_iqr_baseline", "gbs_baseline",
    "bandwidth_share_baseline", "kernel_baseline"
)  # fmt: skip
MEMORY = ("peak_rss", "peak_device")
LAYER = (
    "name", "method", "scheme", "format", "kernel", "bits_per_weight", "error_db", "error_of", "damping", "tokens",
    "seconds", "fallback", "outlier_columns", "outlier_misses"
)  # fmt: skip
BLOCKS: dict[str, Keys] = {"host": HOST, "size": SIZE, "quality": QUALITY, "memory": MEMORY}
COST = ("name", "tokens", "kl_mean", "kl_p99", "top1_agreement", "ppl_ratio", "ppl_ratio_stderr")
ROWS: dict[str, Keys] = {"costs": COST, "speed": SPEED, "layers": LAYER}
ADDED: dict[str, Keys] = {"speed": SPEED_ADDED}


def block(keys: Keys, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` under exactly `keys`, null where missing. Raises ValueError for a key that is not one of them."""
    unknown = set(values) - set(keys)
    if unknown:
        raise ValueError(f"report: no such key: {', '.join(sorted(unknown))}")
    return {key: values.get(key) for key in keys}


def build(values: Mapping[str, Any]) -> dict[str, Any]:
    """A whole report from its parts; parts and figures that are left out become null (lists and `tasks`: empty)."""
    report = block(TOP, {"schema_version": SCHEMA_VERSION, **values})
    for name, keys in BLOCKS.items():
        report[name] = block(keys, report[name] or {})
    for name, keys in ROWS.items():
        report[name] = [block((*keys, *ADDED.get(name, ())), row) for row in report[name] or []]
    for name in ("phases", "fallbacks", "skipped", "gates", "notes"):
        report[name] = list(report[name] or [])
    for name in ("versions", "tasks"):
        report[name] = dict(report[name] or {})
    return report


def figures(report: Mapping[str, Any]) -> dict[str, float | None]:
    """Every figure of `report` that a gate can bound or a comparison can show, by one flat name; None: not measured.

    Speeds are those at batch 1.
    """
    size, quality = report["size"], report["quality"]
    flat: dict[str, float | None] = {key: size[key] for key in SIZE}
    flat["size_ratio"] = _ratio(size["bytes"], size["bytes_baseline"])
    flat |= {key: quality[key] for key in QUALITY if key not in ("text", "kl_histogram")}
    for phase in ("prefill", "decode"):
        rows = (row for row in report["speed"] if row["phase"] == phase and row["batch"] == 1)
        row = next(rows, block(SPEED, {}))
        flat[f"{phase}_tokens_per_s"] = row["tokens_per_s"]
        flat[f"{phase}_speedup"] = _ratio(row["tokens_per_s"], row["tokens_per_s_baseline"])
    flat |= report["memory"]
    flat["recovery"] = report["recovery"]
    flat["fallbacks"], flat["skipped"] = len(report["fallbacks"]), len(report["skipped"])
    flat["error_db_min"] = min(
        (row["error_db"] for row in report["layers"] if row["error_db"] is not None), default=None
    )
    misses = [row["outlier_misses"] for row in report["layers"] if row["outlier_misses"] is not None]
    flat["outlier_misses"] = sum(miss["over"] for miss in misses) if misses else None
    return flat


def _ratio(value: float | None, reference: float | None) -> float | None:
    return value / reference if value is not None and reference else None


def without_infinities(report: dict[str, Any]) -> dict[str, Any]:
    """`report` with every NaN and infinity, which JSON cannot say, as null, and one note that names them all."""
    broken: list[str] = []

    def clean(value: Any, path: str) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            broken.append(f"{path} ({value})")
            return None
        if isinstance(value, dict):
            return {key: clean(item, f"{path}.{key}" if path else key) for key, item in value.items()}
        if isinstance(value, list):
            return [clean(item, f"{path}[{index}]") for index, item in enumerate(value)]
        return value

    cleaned = clean(report, "")
    if broken:
        cleaned["notes"].append(f"not finite, so the model's output is broken somewhere: {', '.join(broken)}")
    return cleaned


def to_json(report: Mapping[str, Any]) -> str:
    """The text of report.json."""
    return json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_report(path: Path) -> dict[str, Any]:
    """The report in `path`, a file or a folder that holds report.json.

    Raises InputError for one that is missing, is not JSON, is of another schema version or lacks keys.
    """
    file = path / "report.json" if path.is_dir() else path
    if not file.exists():
        raise InputError(
            f"{file}: there is no such report: write one with `lmpress eval CHECKPOINT --report {file.parent}`"
        )
    report = read_object(file)
    if report.get("schema_version") != SCHEMA_VERSION:
        found = report.get("schema_version")
        raise InputError(f"{file}: field 'schema_version' is {found!r}, not {SCHEMA_VERSION}: evaluate again")
    for added in ("costs", "phases"):  # not in reports of the first releases
        report.setdefault(added, [])
    for where, part, keys in _parts(report):
        if not isinstance(part, dict):
            raise InputError(f"{file}: field {where!r} is not an object: evaluate again")
        for key in keys:
            if key not in part:
                raise InputError(f"{file}: field {f'{where}.{key}'.lstrip('.')!r} is missing: evaluate again")
    for name, keys in ADDED.items():
        report[name] = [dict.fromkeys(keys) | row for row in report[name]]
    return report


def _parts(report: dict[str, Any]) -> Iterator[tuple[str, Any, Keys]]:
    """(path, object, keys it must have) of a report read from a file, outermost first."""
    yield "", report, TOP
    for name, keys in BLOCKS.items():
        yield name, report[name], keys
    for name, keys in ROWS.items():
        yield from ((f"{name}.{index}", row, keys) for index, row in enumerate(report[name]))
