"""Whole runs on tiny models: what is written is what was meant, loads elsewhere, and refuses what it must."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from compress.checkpoint import manifest
from compress.checkpoint.reader import open_checkpoint
from compress.errors import InputError
from compress.pipeline import RunOptions, prepare, run
from compress.recipe import Recipe, parse
from compress.runtime.load import Execution, load_model
from tests.tiny import write_model

REFERENCE = Execution("reference")  # what transformers computes, to the last tie
IDS = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(5))


class Silent:
    """An observer that remembers the kinds of events."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def event(self, kind: str, /, **fields: Any) -> None:
        self.kinds.append(kind)


def recipe(model: Path, output: Path, text: Path | str, *stages: dict[str, Any], **more: Any) -> Recipe:
    calibration = {"source": str(text), "samples": 16, "seqlen": 64}
    document = {"version": 1, "model": str(model), "output": str(output), "calibration": calibration, **more}
    return parse({**document, "stages": list(stages)}, "recipe.yaml")


def quantize(method: str = "gptq", scheme: str = "W4A16", **more: Any) -> dict[str, Any]:
    group = {} if scheme in ("W8A8", "LLM_INT8") else {"group_size": 32}
    return {"quantize": {"method": method, "scheme": scheme, **group, **more}}


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("gptq W4A16", [quantize()]),
        ("rtn W8A16", [quantize("rtn", "W8A16")]),
        ("smoothquant W8A8", [{"transform": {"method": "smoothquant"}}, quantize("gptq", "W8A8")]),
        ("awq gptq W4A16", [{"transform": {"method": "awq"}}, quantize()]),
        ("mixed", [quantize(), {**quantize("rtn", "W8A16"), "targets": ["*.self_attn.*"]}]),
    ],
)
def test_output_loads_in_transformers_and_here_alike(
    name: str, stages: list[dict[str, Any]], tiny_llama: Path, tiny_text: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    outcome = run(recipe(tiny_llama, output, tiny_text, *stages), RunOptions(), Silent())
    assert outcome.manifest.fallbacks == []
    manifest.check(outcome.manifest, open_checkpoint(output))
    theirs = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    mine = load_model(output, execution=REFERENCE)
    with torch.no_grad():
        expected = theirs(IDS).logits
    logits = mine.logits(mine.hidden(IDS))
    assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-3
    original = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.no_grad():
        before = original(IDS).logits
    error = float((expected - before).square().sum() / before.square().sum())
    assert error < (0.15 if "W4" in name or name == "mixed" else 0.005), "far from the source model"


def test_plan_says_what_is_written(tiny_llama: Path, tiny_text: Path, tmp_path: Path) -> None:
    bound = recipe(tiny_llama, tmp_path / "out", tiny_text, quantize())
    plan = prepare(bound).plan
    run(bound, RunOptions(), Silent())
    assert open_checkpoint(tmp_path / "out").nbytes == plan.bytes_after
    assert plan.bytes_before == open_checkpoint(tiny_llama).nbytes
    assert plan.bits_per_weight() == pytest.approx(4 + 16 / 32 + 8 * 16 * 14 / (2 * 36864), abs=1e-6)


def test_tied_embeddings_stay_tied(tiny_text: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", tie_word_embeddings=True)
    weights = load_file(model / "model.safetensors")
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    outcome = run(recipe(model, tmp_path / "out", tiny_text, quantize()), RunOptions(), Silent())
    assert "lm_head.weight" not in open_checkpoint(tmp_path / "out").tensors
    assert {"name": "lm_head.weight", "reason": "a second copy of the tied embedding"} in outcome.manifest.skipped
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight


def test_transforms_change_norms_and_nothing_else_off_the_grid(
    tiny_llama: Path, tiny_text: Path, tmp_path: Path
) -> None:
    run(recipe(tiny_llama, tmp_path / "out", tiny_text, {"transform": {"method": "smoothquant"}}, quantize()),
        RunOptions(), Silent())  # fmt: skip
    before, after = open_checkpoint(tiny_llama), open_checkpoint(tmp_path / "out")
    kept = [name for name in before.tensors if name in after.tensors]
    changed = {name for name in kept if not torch.equal(before.read(name), after.read(name))}
    norms = {f"model.layers.{i}.{n}.weight" for i in (0, 1) for n in ("input_layernorm", "post_attention_layernorm")}
    assert changed == norms


def test_same_recipe_twice_is_done_once_and_another_is_refused(
    tiny_llama: Path, tiny_text: Path, tmp_path: Path
) -> None:
    bound = recipe(tiny_llama, tmp_path / "out", tiny_text, quantize())
    run(bound, RunOptions(), Silent())
    again = Silent()
    run(bound, RunOptions(), again)
    assert again.kinds == ["complete"]
    other = recipe(tiny_llama, tmp_path / "out", tiny_text, quantize("rtn"))
    with pytest.raises(InputError, match="another recipe or model.*--restart"):
        run(other, RunOptions(), Silent())
    restarted = run(other, RunOptions(restart=True), Silent())
    assert {layer["method"] for layer in restarted.manifest.layers} == {"rtn"}


def test_quantized_sources_are_named_and_go_on_only_when_asked(
    tiny_llama: Path, tiny_text: Path, tmp_path: Path
) -> None:
    run(recipe(tiny_llama, tmp_path / "eight", tiny_text, quantize("rtn", "W8A16")), RunOptions(), Silent())
    second = recipe(tmp_path / "eight", tmp_path / "four", tiny_text, quantize())
    with pytest.raises(InputError, match=r"already quantized \(compressed-tensors, 8 bits.*--dequantize"):
        run(second, RunOptions(), Silent())
    run(second, RunOptions(dequantize=True), Silent())
    config = json.loads((tmp_path / "four" / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 4
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "four", dtype=torch.float32)
    direct = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.no_grad():
        error = (theirs(IDS).logits - direct(IDS).logits).square().sum() / direct(IDS).logits.square().sum()
    assert float(error) < 0.15


def test_the_model_writes_its_own_calibration_text(tiny_llama: Path, tmp_path: Path) -> None:
    bound = recipe(tiny_llama, tmp_path / "out", "self", quantize())
    observer = Silent()
    outcome = run(bound, RunOptions(), observer)
    told = outcome.manifest.calibration
    assert told is not None and told["source"] == "self" and told["seed"] == 0 and told["tokens"] == 1024
    assert "sampling" in observer.kinds
    twin = run(recipe(tiny_llama, tmp_path / "twin", "self", quantize()), RunOptions(), Silent())
    assert twin.manifest.calibration == told
    assert not (tmp_path / "out" / "work").exists()


def test_too_few_tokens_and_dead_channels_are_named(tiny_text: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.input_layernorm.weight"][7] = 0
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    bound = recipe(model, tmp_path / "out", tiny_text, quantize())
    short = bound.calibration.model_copy(update={"samples": 1, "seqlen": 100})
    outcome = run(bound.model_copy(update={"calibration": short}), RunOptions(), Silent())
    assert outcome.manifest.calibration is not None
    notes = outcome.manifest.calibration["notes"]
    assert "100 tokens are fewer than the input channels of 2 layers (model.layers.0.mlp.down_proj, ...)" in notes[-2]
    assert "3 input channels in 3 layers were zero in every token (model.layers.0.self_attn.q_proj" in notes[-1]


def test_output_layer_on_the_grid(tiny_llama: Path, tiny_text: Path, tmp_path: Path) -> None:
    head = {**quantize("rtn", "W8A16"), "targets": ["lm_head"]}
    run(recipe(tiny_llama, tmp_path / "out", tiny_text, quantize(), head), RunOptions(), Silent())
    tensors = open_checkpoint(tmp_path / "out").tensors
    assert "lm_head.weight_packed" in tensors and "lm_head.weight" not in tensors
    mine = load_model(tmp_path / "out", execution=REFERENCE)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(IDS).logits
    assert float((mine.logits(mine.hidden(IDS)) - expected).abs().max() / expected.abs().max()) < 1e-3


def test_broken_weights_are_named_not_propagated(tiny_llama: Path, tiny_text: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.self_attn.v_proj.weight"][3, 4] = float("nan")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="tensor 'model.layers.0.self_attn.v_proj.weight' holds NaN"):
        run(recipe(model, tmp_path / "out", tiny_text, quantize()), RunOptions(), Silent())
    assert not (tmp_path / "out").exists()


def test_tokenizers_of_other_models_are_named(tiny_llama: Path, tiny_text: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", vocab_size=64, bos_token_id=1, eos_token_id=2, pad_token_id=3)
    with pytest.raises(InputError, match=r"calibration: token \d+ is beyond the 64 rows"):
        run(recipe(model, tmp_path / "out", tiny_text, quantize()), RunOptions(), Silent())


@pytest.mark.parametrize("where", ["model", "model/out"])
def test_output_may_not_lie_in_the_model(where: str, tmp_path: Path, tiny_text: Path) -> None:
    model = write_model(tmp_path / "model")
    with pytest.raises(InputError, match="overlaps the model folder"):
        run(recipe(model, tmp_path / where, tiny_text, quantize()), RunOptions(), Silent())


@pytest.mark.parametrize(
    ("model_type", "changes", "derived"),
    [
        ("opt", {"ffn_dim": 128, "word_embed_proj_dim": 32}, None),  # learned positions and a projection in front
        ("bloom", {"n_head": 4, "n_layer": 2}, None),  # a norm in front
        ("llama", {}, "model.layers.1.self_attn.rotary_emb.inv_freq"),
    ],
    ids=["opt", "bloom", "old llama"],
)
def test_all_that_lies_in_front_of_the_blocks_is_run(
    model_type: str, changes: dict[str, Any], derived: str | None, tiny_text: Path, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", model_type, **changes)
    if derived:
        added = {derived: torch.ones(8)}
        save_file(load_file(model / "model.safetensors") | added, model / "model.safetensors", {"format": "pt"})
    outcome = run(recipe(model, tmp_path / "out", tiny_text, quantize(scheme="W8A16")), RunOptions(), Silent())
    assert min(layer["error_db"] for layer in outcome.manifest.layers) > 35
    assert derived not in open_checkpoint(tmp_path / "out").tensors
    compressed, original = load_model(tmp_path / "out"), load_model(model)
    logits, wanted = (found.logits(found.hidden(IDS)) for found in (compressed, original))
    assert float((logits - wanted).norm() / wanted.norm()) < 0.05
