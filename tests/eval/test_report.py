"""report.json: its keys are a contract; null where not measured, never absent, never NaN."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compress.errors import InputError
from compress.eval.report import block, build, figures, read_report, to_json, without_infinities

# Copied from the design, not from the code: other tools read these.
KEYS = {
    "size": {"bytes", "bytes_baseline", "bits_per_weight", "kv_bytes_per_token"},
    "quality": {
        *("text", "tokens", "ppl", "ppl_stderr", "ppl_baseline", "ppl_ratio", "bits_per_byte"),
        *("kl_mean", "kl_median", "kl_p99", "kl_max", "top1_agreement"),
    },
    "host": {"cpu", "threads", "memory_bandwidth_gbs", "gpu"},
    "memory": {"peak_rss", "peak_device"},
}
TOP = {
    *(
        "schema_version",
        "model",
        "baseline",
        "recipe_sha256",
        "created",
        "versions",
        "host",
        "size",
        "quality",
        "tasks",
    ),
    *("recovery", "costs", "speed", "memory", "layers", "phases", "fallbacks", "skipped", "gates", "notes"),
}
SPEED = {
    *("phase", "batch", "prompt", "new", "tokens_per_s", "tokens_per_s_baseline", "chars_per_s", "gbs"),
    *("bandwidth_share", "kernel"),
}
LAYER = {
    *("name", "method", "scheme", "format", "kernel", "bits_per_weight", "error_db", "damping", "tokens", "seconds"),
    "fallback",
}


def check_keys(report: dict[str, Any]) -> None:
    assert report.keys() == TOP
    for name, keys in KEYS.items():
        assert keys <= report[name].keys()
    assert all(row.keys() >= SPEED for row in report["speed"])
    assert all(row.keys() >= LAYER for row in report["layers"])
    assert report["schema_version"] == 1


def test_an_empty_report_has_every_key() -> None:
    report = build({"speed": [{"phase": "decode"}], "layers": [{"name": "a"}]})
    check_keys(report)
    assert all(value is None for name in KEYS for value in report[name].values())
    json.loads(to_json(report))


def test_a_measured_report_has_every_key_and_survives_a_file(report: dict[str, Any], tmp_path: Path) -> None:
    check_keys(report)
    (tmp_path / "report.json").write_text(to_json(report))
    assert read_report(tmp_path) == read_report(tmp_path / "report.json") == report


def test_a_key_nobody_agreed_on_is_refused() -> None:
    with pytest.raises(ValueError, match="perplexity"):
        block(("ppl",), {"perplexity": 1.0})


def test_figures_are_flat_and_derived() -> None:
    report = build(
        {
            "size": {"bytes": 25, "bytes_baseline": 100},
            "speed": [{"phase": "decode", "batch": 1, "tokens_per_s": 30.0, "tokens_per_s_baseline": 20.0}],
            "layers": [
                {"error_db": 20.0, "outlier_misses": {"over": 2, "seen": 9}},
                {"error_db": 15.0, "outlier_misses": {"over": 1, "seen": 9}},
            ],
            "fallbacks": [{"name": "a", "reason": "b"}],
        }
    )
    found = figures(report)
    assert (found["size_ratio"], found["decode_speedup"], found["prefill_speedup"]) == (0.25, 1.5, None)
    assert (found["error_db_min"], found["outlier_misses"], found["fallbacks"], found["skipped"]) == (15.0, 3, 1, 0)


def test_nan_and_infinity_become_null_and_a_note() -> None:
    report = build({"quality": {"ppl": float("inf"), "kl_mean": float("nan"), "tokens": 3}})
    cleaned = without_infinities(report)
    assert cleaned["quality"]["ppl"] is None and cleaned["quality"]["tokens"] == 3
    assert "quality.ppl (inf), quality.kl_mean (nan)" in cleaned["notes"][0]
    assert without_infinities(build({})) == build({})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "not an object"),
        ('{"schema_version": 2}', "'schema_version' is 2"),
        ('{"schema_version": 1}', "'model' is missing"),
    ],
)
def test_a_file_that_is_no_report_is_named(tmp_path: Path, change: str, words: str) -> None:
    file = tmp_path / "report.json"
    file.write_text(change)
    with pytest.raises(InputError, match=words) as caught:
        read_report(tmp_path)
    assert str(file) in str(caught.value)


def test_a_missing_inner_key_is_named(tmp_path: Path) -> None:
    broken = build({"speed": [{"phase": "decode"}]})
    del broken["speed"][0]["gbs"]
    (tmp_path / "report.json").write_text(to_json(broken))
    with pytest.raises(InputError, match=r"'speed\.0\.gbs' is missing"):
        read_report(tmp_path)
    with pytest.raises(InputError, match="there is no such report"):
        read_report(tmp_path / "elsewhere.json")
