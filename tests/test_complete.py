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
    return folder


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_every_method_has_a_test_and_a_recipe(kind: str, name: str) -> None:
    assert (ROOT / "tests" / kind / f"test_{name}.py").is_file()
    stages = [stage for recipe in shipped() for stage in load(recipe).stages]
    assert (kind, name) in {(stage.kind, stage.method) for stage in stages}


@pytest.mark.parametrize("name", list(shipped()))
def test_every_recipe_runs(name: str, model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    text = f"calibration.source={model / 'texts' / 'web.txt'}"
    short = settings(*SMALL, text, "evaluate.gates=[]")
    done = lmpress("run", name, "--model", str(model), "--output", str(output), *short, "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["fallbacks"] == []
    assert (told["report"]["quality"]["ppl"] is not None) == bool(load(name).evaluate.text)
    manifest = json.loads((output / "lmpress.json").read_text())
    assert len(manifest["layers"]) == 14
    assert {method for layer in manifest["layers"] for method in layer["method"].split("+")} == {
        stage.method for stage in load(name).stages if stage.kind != "transform"
    }
    loaded = load_model(output)
    logits = loaded.logits(loaded.hidden(torch.arange(24).view(2, 12)))
    assert logits.shape == (2, 12, 288) and bool(logits.isfinite().all())
