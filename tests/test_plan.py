"""Plans: config.json and shards must be of one model, memory counts what a run holds, and notes say what is odd."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.assignment import assign
from compress.checkpoint import open_checkpoint
from compress.errors import InputError
from compress.kernels.cpu import build
from compress.model import build_skeleton
from compress.plan import PROCESS_BYTES, Plan, make_plan
from compress.recipe import parse
from tests.tiny import TINY, write_model

RTN: dict[str, Any] = {"quantize": {"method": "rtn", "scheme": "W8A16", "group_size": 32}}
GPTQ: dict[str, Any] = {"quantize": {"method": "gptq", "scheme": "W4A16", "group_size": 32}}
AWQ: dict[str, Any] = {"transform": {"method": "awq"}}
DOWN = "model.layers.1.mlp.down_proj.weight"
FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def planned(folder: Path, *stages: dict[str, Any], **calibration: Any) -> Plan:
    document = {"version": 1, "stages": list(stages), "calibration": {"samples": 4, "seqlen": 64} | calibration}
    recipe, skeleton = parse(document, "recipe.yaml"), build_skeleton(folder)
    return make_plan(recipe, open_checkpoint(folder), skeleton, assign(recipe, skeleton))


def altered(folder: Path, target: Path, change: Change) -> Path:
    shutil.copytree(folder, target)
    save_file(change(load_file(folder / "model.safetensors")), target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {n: x for n, x in t.items() if n != DOWN}, f"tensor '{DOWN}' is missing: the shards are not the wh"),
        (lambda t: t | {f"{DOWN}_g": torch.zeros(1)}, f"tensor '{DOWN}_g' belongs to no layer: config.json"),
        (
            lambda t: t | {DOWN: t[DOWN][:-1]},
            f"tensor '{DOWN}' has shape [63, 128], and config.json asks for [64, 128]",
        ),
        (lambda t: {n: x for n, x in t.items() if n != "lm_head.weight"}, "tensor 'lm_head.weight' is missing"),
    ],
    ids=["missing", "extra", "shape", "no head"],
)
def test_shards_of_another_model_are_refused(tiny_llama: Path, tmp_path: Path, change: Change, words: str) -> None:
    with pytest.raises(InputError) as caught:
        planned(altered(tiny_llama, tmp_path / "model", change), RTN)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_derived_tables_are_dropped_and_strangers_outside_the_blocks_copied(tiny_llama: Path, tmp_path: Path) -> None:
    added = {FREQUENCIES: torch.ones(8), "mtp.weight": torch.ones(3)}
    plan = planned(altered(tiny_llama, tmp_path / "model", lambda tensors: tensors | added), RTN)
    assert plan.dropped == {FREQUENCIES: "a table that loaders compute"}
    assert any(FREQUENCIES in note and "are dropped" in note for note in plan.assignment.notes)
    assert any("1 tensors belong to no layer" in note and "mtp.weight" in note for note in plan.assignment.notes)
    stored = {name for _, parts in plan.sections for name in parts}
    assert "mtp.weight" in stored and FREQUENCIES not in stored


def test_a_head_that_transformers_renames_is_copied_with_a_note(tmp_path: Path) -> None:
    plan = planned(write_model(tmp_path / "model", "gpt_neox"), RTN)
    assert "embed_out.weight" in {name for _, parts in plan.sections for name in parts}
    (note,) = plan.assignment.notes
    assert note == "lm_head.weight is stored as embed_out.weight, which transformers renames and lmpress cannot run"


def test_fused_experts_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="gate_up_proj': transformers keeps the experts of model_type 'mixtral' as one"
    ):
        planned(write_model(tmp_path / "model", "mixtral", num_local_experts=4), RTN)


def test_a_second_copy_of_a_tied_embedding_is_dropped_only_if_it_is_one(tmp_path: Path) -> None:
    tied = write_model(tmp_path / "tied", tie_word_embeddings=True)
    assert planned(tied, RTN).dropped == {}

    def copied(factor: float) -> Change:
        return lambda tensors: tensors | {"lm_head.weight": factor * tensors["model.embed_tokens.weight"]}

    twice = altered(tied, tmp_path / "twice", copied(1.0))
    assert planned(twice, RTN).dropped == {"lm_head.weight": "a second copy of the tied embedding"}
    with pytest.raises(InputError, match="field 'tie_word_embeddings' is true, but tensor 'lm_head.weight' differs"):
        planned(altered(tied, tmp_path / "other", copied(2.0)), RTN)


def test_ties_that_config_json_does_not_state(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "gemma", "gemma", tie_word_embeddings=True)
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    assert planned(folder, RTN).assignment.untouched == {"lm_head": "tied to the embedding"}


def test_memory_counts_the_model_that_writes_its_own_text(tiny_llama: Path) -> None:
    tokens = {"samples": 1024, "seqlen": 512}
    itself = planned(tiny_llama, GPTQ, source="self", **tokens)
    weights = sum(prod(row.shape) for row in itself.rows)
    # Keys and values: two layers of two heads of 16, as float32.
    assert itself.peak_memory == PROCESS_BYTES + 4 * weights + 1024 * 512 * 2 * 2 * 2 * 16 * 4
    assert planned(tiny_llama, GPTQ, source="text.txt", **tokens).peak_memory < itself.peak_memory
    assert planned(tiny_llama, RTN, source="self", **tokens).peak_memory < PROCESS_BYTES + 4 * weights


def test_memory_counts_the_hessians_of_transforms(tiny_llama: Path) -> None:
    alone = planned(tiny_llama, RTN)
    behind = planned(tiny_llama, AWQ, RTN, source="text.txt", samples=1, seqlen=2)
    # Inputs of q/k/v, o and gate/up have 64 columns, of down 128; beside all of them, what one group is solved in.
    hessians = 4 * (3 * 64**2 + 128**2)
    solver = (3 * 4 * 128**2 + 12 * 64 * 128) - 12 * 2 * 64 * 128
    assert behind.peak_memory - alone.peak_memory == hessians + solver + 4 * 2 * 64


def test_rows_name_the_kernel_that_would_run(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for choice, name in ((build.supported()[-1], f"cpu-{build.supported()[-1]}"), ("none", "reference")):
        monkeypatch.setenv("LMPRESS_CPU_VARIANT", choice)
        assert {row.scheme: row.kernel for row in planned(tiny_llama, RTN).rows} == {"": "", "W8A16 g32": name}


def test_sequences_beyond_the_models_positions_are_noted(tiny_llama: Path) -> None:
    limit = TINY["max_position_embeddings"]
    assert planned(tiny_llama, GPTQ, seqlen=limit).assignment.notes == ()
    (note,) = planned(tiny_llama, GPTQ, seqlen=limit + 1).assignment.notes
    assert note.startswith("calibration.seqlen 513 is beyond the 512 positions")
    assert planned(tiny_llama, RTN, seqlen=limit + 1).assignment.notes == ()


def test_blocks_beyond_those_of_the_config_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "cut")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(InputError, match=r"tensor 'model.layers.1.\S+' belongs to no layer \(and 8 more\)"):
        planned(folder, RTN)
