"""Skeletons: blocks, linear layers, groups and pairs of every family in the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from compress.activations import ActivationBuffer
from compress.architecture import kv_bytes_per_token, one_line
from compress.calibrate import embed
from compress.checkpoint import open_checkpoint
from compress.errors import InputError
from compress.model import FAMILIES, build_skeleton, input_groups, materialized, pairs
from tests.tiny import TINY, write_model

# A model_type that transformers has and the table has not.
OTHER = "gpt_neox"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: write_model(root / name, name, query_pre_attn_scalar=16) for name in FAMILIES}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_has_its_blocks_and_pairs(family: str, folders: dict[str, Path]) -> None:
    skeleton = build_skeleton(folders[family])
    assert skeleton.blocks == ["model.layers.0", "model.layers.1"]
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    groups = input_groups(skeleton.block_linears(1))
    assert [len(group) for group in groups] == [3, 1, 2, 1]
    reference = AutoModelForCausalLM.from_pretrained(folders[family])
    found = pairs(skeleton, 1)
    assert [pair.kind for pair in found] == ["norm", "linear", "norm", "linear"]
    for pair in found:
        producer = reference.get_submodule(pair.producer).weight
        for consumer in pair.consumers:
            columns = reference.get_submodule(consumer).weight.shape[1]
            assert columns == (len(producer) if pair.kind == "norm" else len(producer) * pair.repeat)


def test_materialized_lends_weights_and_takes_them_back(tiny_llama: Path) -> None:
    block = build_skeleton(tiny_llama).block(0)
    weights = {name: torch.randn(parameter.shape) for name, parameter in block.named_parameters()}
    with materialized(block, weights):
        assert all(torch.equal(parameter, weights[name]) for name, parameter in block.named_parameters())
    assert all(parameter.is_meta for parameter in block.parameters())
    with pytest.raises(RuntimeError), materialized(block, {}):
        pass
    assert all(parameter.is_meta for parameter in block.parameters())


def test_unknown_architectures_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lama", "hidden_size": 8}))
    with pytest.raises(InputError, match="config.json: no causal language model.*lama") as caught:
        build_skeleton(tmp_path)
    assert "\n" not in str(caught.value)


def test_values_that_cannot_be_are_named_in_one_line(tiny_llama: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_llama / "config.json").read_text())
    for field, value in {
        "hidden_size": "wide",
        "num_attention_heads": 0,
        "hidden_act": "unheard_of",
        "vocab_size": 100,
    }.items():
        (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
        with pytest.raises(InputError, match="config.json: no causal language model can be built from it: ") as caught:
            build_skeleton(tmp_path)
        assert "\n" not in str(caught.value)
    assert "hidden_size" in one_line(ValueError("field 'hidden_size':\n  not an int\n\nmore"))


def test_code_in_the_folder_is_never_run(tiny_llama: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_llama / "config.json").read_text())
    foreign = {
        "model_type": "foreign",
        "auto_map": {"AutoConfig": "foreign.Config", "AutoModelForCausalLM": "foreign.M"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config | foreign))
    (tmp_path / "foreign.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(InputError, match="no causal language model"):
        build_skeleton(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_ties_are_those_of_transformers(folders: dict[str, Path]) -> None:
    """Gemma's embeddings are tied where config.json does not say."""
    config = json.loads((folders["gemma"] / "config.json").read_text())
    assert not build_skeleton(folders["gemma"]).tied
    del config["tie_word_embeddings"]
    silent = folders["gemma"].parent / "silent"
    silent.mkdir()
    (silent / "config.json").write_text(json.dumps(config))
    skeleton = build_skeleton(silent)
    assert skeleton.tied and skeleton.front_parameters() == ["model.embed_tokens.weight", "model.norm.weight"]


def test_the_front_holds_positions_too(tmp_path: Path) -> None:
    """Without OPT's learned positions, hidden states in front of block 0 would stay on meta."""
    folder = write_model(tmp_path / "opt", "opt", torch.float32, ffn_dim=128, word_embed_proj_dim=32)
    skeleton, source = build_skeleton(folder), open_checkpoint(folder)
    weights = {name: source.read(name) for name in skeleton.front_parameters()}
    assert "model.decoder.embed_positions.weight" in weights and "lm_head.weight" not in weights
    ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    with materialized(skeleton.model, weights, strict=False):
        calibration = embed(skeleton, ids, 2, ActivationBuffer(1 << 20, tmp_path))
    with torch.no_grad():
        reference = AutoModelForCausalLM.from_pretrained(folder)(ids, output_hidden_states=True)
    assert torch.allclose(calibration.hidden[0], reference.hidden_states[0], atol=1e-6)
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())


def test_families_without_a_table_have_no_pairs(tmp_path: Path) -> None:
    write_model(tmp_path / "other", OTHER)
    skeleton = build_skeleton(tmp_path / "other")
    assert skeleton.family is None and len(skeleton.blocks) == 2
    with pytest.raises(InputError, match="gpt_neox.*leave the transform stage out"):
        pairs(skeleton, 0)


def test_kv_bytes_follow_the_formula(tiny_llama: Path) -> None:
    sizes = build_skeleton(tiny_llama).dimensions
    expected = 2 * TINY["num_hidden_layers"] * TINY["num_key_value_heads"] * TINY["head_dim"] * 2
    assert kv_bytes_per_token(sizes, 2) == expected
    assert kv_bytes_per_token(sizes, 1) == expected // 2


def test_linears_are_all_there_is(tiny_llama: Path) -> None:
    skeleton = build_skeleton(tiny_llama)
    assert set(skeleton.classes().values()) == {"Linear", "Embedding"}
    name, embedding = skeleton.embedding()
    assert name == "model.embed_tokens" and isinstance(embedding, nn.Embedding)
    assert skeleton.output_name() == "lm_head"
    assert skeleton.shape("model.layers.0.self_attn.k_proj") == (32, 64)
