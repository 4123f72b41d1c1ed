"""Pruning as scripts see it: the one-stage verbs, the proof of the pattern, and what a report says of the loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compress.eval.run import Request, evaluate
from compress.eval.sparsity import pruning_notes
from compress.eval.subject import open_stored
from tests.command import lmpress


@pytest.fixture(scope="module")
def pruned(tiny_llama: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("prune") / "out"
    calibration = ("--calibration", str(tiny_text), "--samples", "8", "--seqlen", "64")
    done = lmpress("prune", "--model", str(tiny_llama), "--output", str(output), *calibration, "--json")
    assert done.code == 0, done.err
    return output


def test_a_pruned_checkpoint_proves_its_pattern(pruned: Path) -> None:
    told = json.loads(lmpress("inspect", str(pruned), "--sparsity", "--json").out)
    patterns = {row["name"]: row["pattern"] for row in told["sparsity"]}
    assert len(patterns) == 16 and sum(pattern == "2:4" for pattern in patterns.values()) == 14
    assert {module["scheme"] for module in told["modules"]} == {"W16A16+2:4", None}
    shown = lmpress("inspect", str(pruned), "--sparsity").out
    assert "Sparsity" in shown and "model.layers.1.mlp.down_proj" in shown


def test_a_report_says_what_it_cost_and_what_others_read(pruned: Path, tiny_llama: Path, tiny_text: Path) -> None:
    notes = evaluate(Request(pruned, tiny_llama, texts=(tiny_text,), context=32, limit=256, seconds=0.1))["notes"]
    sizes = next(note for note in notes if note.startswith("pruned: 14 layers to 2:4"))
    assert "as sparse24, which lmpress alone reads; exported as compressed-tensors" in sizes
    assert pruning_notes(open_stored(pruned), 0.05) == [sizes]
    note = pruning_notes(open_stored(pruned), 1.25)[1]
    assert "a KL divergence of 1.25 nats per token is left, over 0.1: win it back by distillation" in note
    assert "`lmpress run recover_sparse24_int4`" in note
    plain = evaluate(Request(tiny_llama, tiny_llama, texts=(tiny_text,), context=32, limit=256, seconds=0.1))["notes"]
    assert not any(note.startswith("pruned") for note in plain)


def test_quantize_takes_a_pattern(tiny_llama: Path, tmp_path: Path) -> None:
    flags = ("--pattern", "2:4", "--group-size", "32", "--dry-run", "--json")
    done = lmpress("quantize", "--model", str(tiny_llama), "--output", str(tmp_path / "out"), *flags)
    assert done.code == 0 and "prune:" in done.err, done.err
    rows = {row["name"]: row for row in json.loads(done.out)["rows"]}
    assert rows["model.layers.0.mlp.up_proj.weight"]["scheme"] == "W4A16+2:4 g32"


@pytest.mark.parametrize(
    ("flags", "told"),
    [(("--pattern", "3:3"), "'3:3' is no pattern"), (("--method", "wandda"), "did you mean 'wanda'?")],
)
def test_usage_mistakes(flags: tuple[str, ...], told: str, tiny_llama: Path, tmp_path: Path) -> None:
    done = lmpress("prune", "--model", str(tiny_llama), "--output", str(tmp_path / "out"), *flags)
    assert done.code == 2 and told in done.err and done.err.count("\n") == 1 and not list(tmp_path.iterdir())
