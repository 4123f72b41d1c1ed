"""Completeness: each method has a test and a recipe, and each shipped recipe runs as it is shipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from compress import methods
from compress.recipe import load, shipped
from compress.runtime.load import load_model
from tests.command import SMALL, lmpress, settings
from tests.tiny import write_model, write_text

ROOT = Path(__file__).parent.parent
METHODS = [(kind, name) for kind in methods.KINDS for name in methods.names(kind)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with texts where the demo model has them, wide enough for groups of 128."""
    folder = write_model(
        tmp_path_factory.mktemp("complete") / "model", hidden_size=128, intermediate_size=256, head_dim=32
    )
    (folder / "texts").mkdir()
    for name in ("web.txt", "wiki.txt"):
        write_text(folder / "texts" / name)
    records = [{"input": f"{n} and 1", "label": str(n + 1), "rationale": f"{n} and one more"} for n in range(20)]
    (folder / "texts" / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_every_method_has_a_test_and_a_recipe(kind: str, name: str) -> None:
    assert (ROOT / "tests" / kind / f"test_{name}.py").is_file()
    stages = [stage for recipe in shipped() for stage in load(recipe).stages]
    used = {(stage.kind, stage.method) for stage in stages}
    used |= {("distill", term.method) for stage in stages if stage.kind == "distill" for term in stage.terms}
    assert (kind, name) in used


# What makes a student small enough for a tiny model.
SIZES = {"depth": {"layers": 1}, "width": {"intermediate_size": 128}, "grouped_query": {"kv_heads": 1}}


def shortened(name: str, model: Path) -> list[str]:
    """Changes that make the stages of a recipe short, and small enough for `model`."""
    changes = [f"calibration.source={model / 'texts' / 'web.txt'}", "evaluate.gates=[]"]
    for number, stage in enumerate(load(name).stages):
        place = f"stages.{number}.{stage.kind}"
        if stage.kind == "shrink":
            changes += [f"{place}.{key}={value}" for key, value in SIZES[stage.method].items()]
        if stage.distillation is not None:
            data = {"source": model / "texts" / ("records.jsonl" if stage.distillation.data.records else "web.txt")}
            data |= {"sequences": 16, "held_out": 2} | ({} if stage.distillation.data.records else {"seqlen": 64})
            changes += [f"{place}.data.{key}={value}" for key, value in data.items()]
            if stage.method == "block_output":
                changes += [f"{place}.epochs=1", f"{place}.batch=2"]
            else:
                changes += [f"{place}.training.{key}=2" for key in ("steps", "batch", "every")]
    return changes


@pytest.mark.parametrize("name", list(shipped()))
def test_every_recipe_runs(name: str, model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = lmpress(
        "run",
        name,
        "--model",
        str(model),
        "--output",
        str(output),
        *settings(*SMALL, *shortened(name, model)),
        "--json",
    )
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["fallbacks"] == []
    assert (told["report"]["quality"]["ppl"] is not None) == bool(load(name).evaluate.text)
    manifest = json.loads((output / "lmpress.json").read_text())
    stages = load(name).stages
    compressing = {stage.method for stage in stages if stage.kind in ("prune", "quantize")}
    assert len(manifest["layers"]) == (14 if compressing else 0)
    training = {stage.method for stage in stages if stage.kind == "distill"} if compressing else set()
    found = {method for layer in manifest["layers"] for method in layer["method"].split("+")}
    assert found == compressing | training
    assert [row["kind"] for row in manifest["phases"]] == [
        stage.kind for stage in stages if stage.kind in ("shrink", "distill")
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.log.jsonl"]
    loaded = load_model(output)
    logits = loaded.logits(loaded.hidden(torch.arange(24).view(2, 12)))
    assert logits.shape == (2, 12, 288) and bool(logits.isfinite().all())
