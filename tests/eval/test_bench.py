"""The bench as a report: its rows, strictness, tables, plots and files. Figures come from a fake of the measuring."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import InputError
from compress.eval import bench, timing
from compress.eval.bench import BenchRequest, publish_bench, run_bench
from compress.eval.report import figures, read_report
from compress.eval.run import Request, evaluate
from compress.eval.speed import Bench, Runs
from compress.eval.speed_plot import roof, speed_image, speed_plot
from compress.eval.tables import speed_table
from compress.runtime.load import Execution

SMALL = Bench((1, 4), prompt=16, new=4, repeat=3)
# By batch size: seconds of (prefill, decode) of the model and of its baseline.
SECONDS = {1: ((1.0, 2.0), (2.0, 4.0)), 4: ((2.0, 4.0), (1.0, 2.0))}


@pytest.fixture
def fake_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs as in SECONDS, 10% apart, on a machine that reads 1 GB/s."""

    def measure(models: Any, workloads: Any, repeat: int, progress: Any) -> list[list[Runs]]:
        def runs(prefill: float, decode: float) -> Runs:
            spread = [0.9 + 0.1 * number for number in range(repeat)]
            return Runs(tuple(prefill * part for part in spread), tuple(decode * part for part in spread))

        return [[runs(*pair) for pair in SECONDS[work.batch][: len(models)]] for work in workloads]

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(bench, "read_bandwidth", lambda device, threads: 1e9)


@pytest.fixture
def benched(packed: Path, tiny_llama: Path, fake_times: None) -> dict[str, Any]:
    return run_bench(BenchRequest(packed, tiny_llama, SMALL, execution=Execution(threads=1), allow_fallback=True))


def test_a_row_per_batch_and_phase_with_kernels_by_format(benched: dict[str, Any]) -> None:
    rows = benched["speed"]
    assert [(row["batch"], row["phase"]) for row in rows] == [
        (1, "prefill"),
        (1, "decode"),
        (4, "prefill"),
        (4, "decode"),
    ]
    assert [row["tokens_per_s"] for row in rows] == pytest.approx([16, 2, 32, 4])
    assert [row["tokens_per_s_baseline"] for row in rows] == pytest.approx([8, 1, 64, 8])
    assert rows[1]["kernel"]["pack-quantized"] and "pack-quantized" not in rows[1]["kernel_baseline"]
    assert rows[3]["gbs"] == pytest.approx(rows[3]["bandwidth_share"])
    # Both read the same keys and values; four sequences more of them.
    assert rows[3]["gbs"] * 4.0 > rows[1]["gbs"] * 2.0
    assert benched["host"]["threads"] == 1 and benched["host"]["memory_bandwidth_gbs"] == 1.0
    assert benched["memory"]["peak_rss"] > 1e8
    assert "quality: not measured by a bench" in benched["notes"]
    assert "at batch 4" in benched["notes"][-1]


def test_figures_are_those_of_batch_1(benched: dict[str, Any]) -> None:
    found = figures(benched)
    assert found["decode_tokens_per_s"] == pytest.approx(2.0)
    assert (found["decode_speedup"], found["prefill_speedup"]) == pytest.approx((2.0, 2.0))
    without = benched | {"speed": [row for row in benched["speed"] if row["batch"] == 4]}
    assert figures(without)["decode_speedup"] is None


def test_threads_are_given_back(packed: Path, fake_times: None) -> None:
    before = torch.get_num_threads()
    run_bench(BenchRequest(packed, None, SMALL, execution=Execution(threads=before + 1), allow_fallback=True))
    assert torch.get_num_threads() == before


def test_a_fallback_is_an_error_unless_allowed_and_then_named(
    packed: Path, fake_times: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress.runtime.load import load_model

    def reference_only(checkpoint: Any, device: str, execution: Execution) -> Any:
        return load_model(checkpoint, device, execution=replace(execution, kernels="reference"))

    monkeypatch.setattr(bench, "load_model", reference_only)
    with pytest.raises(InputError, match=r"q_proj.*and 11 more fell back .*--allow-fallback") as caught:
        run_bench(BenchRequest(packed, None, SMALL))
    assert caught.value.exit_code == 1
    allowed = run_bench(BenchRequest(packed, None, SMALL, allow_fallback=True))
    assert len(allowed["fallbacks"]) == 14
    assert all("'reference'" in row["reason"] for row in allowed["fallbacks"])
    assert allowed["speed"][1]["kernel"] == {"pack-quantized": "reference"}


def test_the_table_says_what_the_rows_say(benched: dict[str, Any]) -> None:
    table = speed_table(benched)
    assert table.columns[:6] == ("phase", "batch", "tokens/s", "IQR", "baseline", "speedup")
    assert "chars/s" not in table.columns
    assert table.rows[3][:6] == ("decode", "4", "4", "10%", "8", "0.5 ×")
    assert "prompt of 16 tokens, 4 new, medians of 3 runs in turn; 1 thread, " in table.note
    assert "memory is read at 1 GB/s" in table.note and "pack-quantized by " in table.note


def test_plots_show_both_models_their_roofs_and_every_batch_size(benched: dict[str, Any]) -> None:
    drawing = speed_plot(benched["speed"], "decode")
    for text in ("this model", "baseline", "this model, bandwidth roof", "baseline, bandwidth roof", ">1<", ">4<"):
        assert text in drawing
    prefill = speed_plot(benched["speed"], "prefill")
    assert "roof" not in prefill and "baseline" in prefill
    assert speed_plot(benched["speed"][:2], "decode") == "" and speed_image(benched["speed"][:2]) is None
    alone = [{**row, "tokens_per_s_baseline": None} for row in benched["speed"]]
    assert "baseline" not in speed_plot(alone, "decode")


def test_the_roof_is_where_the_bandwidth_would_be_used_up() -> None:
    assert roof({"tokens_per_s": 20.0, "bandwidth_share": 0.25}) == 80.0
    assert roof({"tokens_per_s": 20.0, "bandwidth_share": None}) is None


def test_published_files(benched: dict[str, Any], tmp_path: Path) -> None:
    names = ["report.html", "report.json", "report.md", "speed.png"]
    assert sorted(file.name for file in publish_bench(benched, tmp_path)) == names
    assert read_report(tmp_path) == benched
    page = (tmp_path / "report.html").read_text()
    assert "Decoding over batch size" in page and "Prefill over batch size" in page
    ids = [part.partition('"')[0] for part in page.split(' id="')[1:]]
    assert len(ids) == len(set(ids)) and ids
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    assert "| decode | 4 |" in (tmp_path / "report.md").read_text()
    alone = tmp_path / "alone"
    publish_bench(benched | {"speed": benched["speed"][:2]}, alone)
    assert not (alone / "speed.png").exists()


def test_a_report_from_before_the_bench_can_still_be_read(report: dict[str, Any], tmp_path: Path) -> None:
    from compress.eval.report import SPEED_ADDED

    old = json.loads(json.dumps(report))
    for row in old["speed"]:
        for key in SPEED_ADDED:
            del row[key]
    (tmp_path / "report.json").write_text(json.dumps(old))
    found = read_report(tmp_path)
    assert all(row[key] is None for row in found["speed"] for key in SPEED_ADDED)
    speed_table(found)


def test_an_evaluation_runs_the_bench_it_is_asked_for(packed: Path, tiny_llama: Path, fake_times: None) -> None:
    request = Request(packed, tiny_llama, gates=("decode_speedup >= 1.5", "prefill_speedup > 2.5"), bench=SMALL)
    found = evaluate(request)
    assert len(found["speed"]) == 4
    assert [(gate["passed"], gate["value"]) for gate in found["gates"]] == [
        (True, pytest.approx(2.0)),
        (False, pytest.approx(2.0)),
    ]
    with pytest.raises(InputError, match="do not fit into the 512"):
        evaluate(Request(packed, bench=Bench((1,), prompt=500, new=20)))


def test_a_real_run_of_everything(packed: Path, tiny_llama: Path) -> None:
    told: list[int] = []
    tiny = Bench((1, 2), prompt=4, new=2, repeat=2)
    request = BenchRequest(packed, tiny_llama, tiny, allow_fallback=True)
    found = run_bench(request, lambda stage, done, total: told.append(done))
    assert all(row["tokens_per_s"] > 0 and row["tokens_per_s_baseline"] > 0 for row in found["speed"])
    assert all(row["tokens_per_s_iqr"][0] <= row["tokens_per_s_iqr"][1] for row in found["speed"])
    assert told == sorted(told) and len(told) == 14
