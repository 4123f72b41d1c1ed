"""`lmpress run`, `quantize` and `plan` on a tiny model, from the command line to the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from compress.cli.execution import account
from compress.cli.progress import block_line, resumed
from compress.recipe import parse
from tests.command import SMALL, Done, lmpress, settings

RECIPE = """
version: 1
calibration: {samples: 4, seqlen: 32}
stages:
  - quantize: {method: gptq, scheme: W4A16, group_size: 32}
"""


@pytest.fixture
def recipe(tmp_path: Path, tiny_text: Path) -> str:
    """A recipe file that calibrates on the tiny text."""
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.replace("samples", f"source: {tiny_text}, samples"))
    return str(file)


def run(recipe: str, model: Path, output: Path, *more: str) -> Done:
    return lmpress("run", recipe, "--model", str(model), "--output", str(output), *more)


def test_run_tells_json_alone_on_stdout(recipe: str, tiny_llama: Path, tiny_text: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = run(recipe, tiny_llama, output, "--json")
    assert done.code == 0
    told = json.loads(done.out)
    assert told["output"] == str(output) and told["fallbacks"] == []
    assert told["calibration"]["tokens"] == 128
    lines = done.err.splitlines()  # what nobody may miss, although no bar was shown
    assert lines[0] == "0 fallbacks" and lines[1].startswith("left alone: lm_head: ")
    assert lines[2] == f"calibration: 4 x 32 tokens from '{tiny_text}', seed 0"
    assert lines[3:] == [f"calibration: {note}" for note in told["calibration"]["notes"]]
    again = run(recipe, tiny_llama, output, "--json")  # finished already: nothing to do, the same answer
    repeated = json.loads(again.out)
    repeated["report"]["created"] = told["report"]["created"]
    assert (again.code, again.err, repeated) == (0, done.err, told)


def test_without_a_text_the_report_tells_sizes_and_layers(
    recipe: str, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.eval.subject.load_model", lambda *_: pytest.fail("nothing needs a model here"))
    output = tmp_path / "out"
    done = run(recipe, tiny_llama, output)
    assert done.code == 0 and "weights on disk" in done.out and "0 fallbacks" in done.out
    report = json.loads((output / "report.json").read_text())
    assert {"report.md", "report.html"} <= {file.name for file in output.iterdir()}
    assert 0 < report["size"]["bytes"] < report["size"]["bytes_baseline"]
    assert len(report["layers"]) == 14 and all(row["error_db"] > 5 for row in report["layers"])
    assert report["speed"] == [] and {*report["quality"].values(), *report["memory"].values()} == {None}
    assert report["notes"][-1] == "quality, speed and memory: not measured"


def test_account_names_every_fallback_and_note() -> None:
    calibration = {"source": "self", "samples": 2, "seqlen": 8, "seed": 3, "notes": ["few tokens"]}
    told = SimpleNamespace(fallbacks=[{"name": "b.0.q", "reason": "why"}], skipped=[], calibration=calibration)
    assert account(cast(Any, told)) == [
        "1 fallback",
        "fallback: b.0.q: why",
        "calibration: 2 x 8 tokens from 'self', seed 3",
        "calibration: few tokens",
    ]
    told = SimpleNamespace(fallbacks=[], skipped=[], calibration=None)
    assert account(cast(Any, told)) == ["0 fallbacks", "calibration: none needed"]


def test_another_way_to_measure_a_finished_output_measures_it_again(
    recipe: str, tiny_llama: Path, tiny_text: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    assert run(recipe, tiny_llama, output).code == 0
    written = (output / "model.safetensors").stat().st_mtime_ns
    wanted = settings(f"evaluate.text=[{tiny_text}]", "evaluate.context=32", "evaluate.tokens=64")
    assert run(recipe, tiny_llama, output, *wanted).code == 0
    assert json.loads((output / "report.json").read_text())["quality"]["tokens"] == 62
    failing = run(recipe, tiny_llama, output, *wanted, *settings("evaluate.gates=[kl_mean < 0]"))
    assert failing.code == 3
    assert (output / "model.safetensors").stat().st_mtime_ns == written


def test_run_measures_writes_the_report_and_fails_at_a_gate(
    recipe: str, tiny_llama: Path, tiny_text: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    wanted = settings(f"evaluate.text=[{tiny_text}]", "evaluate.context=64", "evaluate.tokens=256")
    passing = run(recipe, tiny_llama, output, *wanted, *settings("evaluate.gates=['kl_mean >= 0', fallbacks == 0]"))
    assert passing.code == 0 and "finished" in passing.out
    report = json.loads((output / "report.json").read_text())
    assert report["quality"]["tokens"] > 0 and report["quality"]["kl_mean"] > 0
    assert [gate["passed"] for gate in report["gates"]] == [True, True]
    failing = run(recipe, tiny_llama, tmp_path / "two", *wanted, *settings("evaluate.gates=[kl_mean < 0]"), "--json")
    assert failing.code == 3 and "gate failed: kl_mean < 0" in failing.err
    assert json.loads(failing.out)["report"]["gates"][0]["passed"] is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("evaluate.text=[no.txt]", "field 'evaluate.text' is 'no.txt': no such file"),
        ("evaluate.gates=[ppl_ration < 2]", "did you mean 'ppl_ratio'?"),
        ("stages.0.quantize.group_size=48", "stages.0.quantize.group_size: 48 does not divide"),
    ],
)
def test_mistakes_show_before_any_work(
    change: str, message: str, recipe: str, tiny_llama: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    done = run(recipe, tiny_llama, tmp_path / "out", *settings(change))
    assert (done.code, done.out) == (2, "")
    assert message in done.err and done.err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_run_needs_a_model_and_an_output(recipe: str, tiny_llama: Path) -> None:
    assert "field 'output' is missing" in lmpress("run", recipe).err
    assert "--model" in lmpress("run", recipe, "--output", "out").err
    done = lmpress("run", recipe, "--model", str(tiny_llama))
    assert done.code == 2 and "--output" in done.err


def test_dry_run_and_plan_say_the_same_and_write_nothing(recipe: str, tiny_llama: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    dry = run(recipe, tiny_llama, tmp_path / "out", "--dry-run", "--json")
    planned = lmpress("plan", recipe, "--model", str(tiny_llama), "--json")
    assert dry.code == planned.code == 0 and dry.out == planned.out
    told = json.loads(planned.out)
    assert told["layers"] == 14 and told["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert sum(row["bytes_after"] for row in told["rows"]) == told["bytes_after"] < told["bytes_before"]
    assert sorted(tmp_path.iterdir()) == before


def test_plan_sums_blocks_up_or_lists_every_tensor(recipe: str, tiny_llama: Path) -> None:
    short = lmpress("plan", recipe, "--model", str(tiny_llama))
    assert "model.layers.*.mlp.up_proj.weight x2" in short.out and "W4A16 g32" in short.out
    full = lmpress("plan", recipe, "--model", str(tiny_llama), "--rows", "--context", "10", "--batch", "3")
    assert "model.layers.1.mlp.up_proj.weight" in full.out and "3 x 10 tokens" in full.out


def test_quantize_prints_the_recipe_it_runs(tiny_llama: Path, tiny_text: Path, tmp_path: Path) -> None:
    flags = ["--model", str(tiny_llama), "--output", str(tmp_path / "out"), "--calibration", str(tiny_text)]
    flags += ["--method", "rtn", "--scheme", "W8A16", "--group-size", "channel", "--target", "*.mlp.*"]
    done = lmpress("quantize", *flags, "--json", *settings(*SMALL, "stages.0.quantize.search=minmax"))
    assert done.code == 0, done.err
    shown = parse(yaml.safe_load(done.err.partition("\n\n")[0]), "shown")
    stage = shown.stages[0]
    assert (stage.method, stage.targets, stage.settings.model_dump()["search"]) == ("rtn", ("*.mlp.*",), "minmax")
    assert stage.scheme is not None and (stage.scheme.name, stage.scheme.grid.group_size) == ("W8A16", None)
    assert json.loads(done.out)["recipe_sha256"] == shown.sha256()


@pytest.mark.parametrize(
    ("flags", "method"),
    [((), "gptq"), (("--scheme", "W8A8"), "gptq"), (("--scheme", "LLM_INT8"), "llm_int8")],
    ids=["plain", "W8A8", "LLM_INT8"],
)
def test_quantize_takes_the_method_that_the_scheme_needs(
    flags: tuple[str, ...], method: str, tiny_llama: Path, tmp_path: Path
) -> None:
    place = ["--model", str(tiny_llama), "--output", str(tmp_path / "out"), "--dry-run", "--json"]
    group = () if flags else ("--group-size", "32")
    done = lmpress("quantize", *place, *flags, *group)
    assert done.code == 0, done.err
    assert parse(yaml.safe_load(done.err), "shown").stages[0].method == method


def test_quantize_names_flags_mistakes_by_field(tiny_llama: Path, tmp_path: Path) -> None:
    place = ["--model", str(tiny_llama), "--output", str(tmp_path / "out")]
    done = lmpress("quantize", *place, "--group-size", "large")
    assert done.code == 2 and "field 'stages.0.quantize.group_size' is 'large'" in done.err


def test_block_line_says_what_matters() -> None:
    layer = {"dead_channels": 0, "outlier_columns": (), "fallback": None, "damping": 0.01}
    layers = [layer | {"name": "b.0.q_proj", "error_db": 31.25}, layer | {"name": "b.0.k_proj", "error_db": 28.0}]
    line = block_line({"name": "b.0", "layers": layers, "seconds": 2.0}, 1_500_000_000)
    assert line == "b.0: q_proj 31.2  k_proj 28.0 dB | damping 0.01 | 2.0 s | 1.50 GB"
    layers[1] |= {"dead_channels": 3, "outlier_columns": (1, 2), "fallback": "why", "damping": None}
    line = block_line({"name": "b.0", "layers": layers[1:], "seconds": 0.5}, 10**9)
    assert line == "b.0: k_proj 28.0 dB | 3 dead channels | 2 outlier columns | FALLBACK: b.0.k_proj | 0.5 s | 1.00 GB"
    assert (resumed(0), resumed(1), resumed(3)) == ("", ", resumed behind block 0", ", resumed behind block 2")


def test_a_bench_in_the_recipe_fills_rows_and_gates(recipe: str, tiny_llama: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    bench = settings("evaluate.bench={batch: [2, 1], prompt: 8, new: 2, repeat: 2}")
    gates = settings("evaluate.gates=[decode_tokens_per_s > 0, decode_speedup > 1e9]")
    done = run(recipe, tiny_llama, output, *bench, *gates)
    assert done.code == 3 and "gate failed: decode_speedup > 1e9" in done.err
    report = json.loads((output / "report.json").read_text())
    assert [(row["batch"], row["phase"], row["runs"]) for row in report["speed"]] == [
        (1, "prefill", 2),
        (1, "decode", 2),
        (2, "prefill", 2),
        (2, "decode", 2),
    ]
    assert [gate["passed"] for gate in report["gates"]] == [True, False]


def test_a_bench_beyond_the_context_is_refused_before_the_work(recipe: str, tiny_llama: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = run(recipe, tiny_llama, output, *settings("evaluate.bench={prompt: 512, new: 1}"))
    assert (done.code, done.out) == (2, "") and "do not fit into the 512 tokens" in done.err
    assert list(tmp_path.glob("out*")) == []
