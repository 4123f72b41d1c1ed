"""Skeletons: blocks, linear layers, groups and pairs of every family in the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from compress.errors import InputError
from compress.model import FAMILIES, build_skeleton, input_groups, kv_bytes_per_token, materialized, pairs
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


def test_families_without_a_table_have_no_pairs(tmp_path: Path) -> None:
    write_model(tmp_path / "other", OTHER)
    skeleton = build_skeleton(tmp_path / "other")
    assert skeleton.family is None and len(skeleton.blocks) == 2
    with pytest.raises(InputError, match="gpt_neox.*leave the transform stage out"):
        pairs(skeleton, 0)


def test_kv_bytes_follow_the_formula(tiny_llama: Path) -> None:
    config = build_skeleton(tiny_llama).config
    expected = 2 * TINY["num_hidden_layers"] * TINY["num_key_value_heads"] * TINY["head_dim"] * 2
    assert kv_bytes_per_token(config, 2) == expected
    assert kv_bytes_per_token(config, 1) == expected // 2


def test_linears_are_all_there_is(tiny_llama: Path) -> None:
    skeleton = build_skeleton(tiny_llama)
    assert set(skeleton.classes().values()) == {"Linear", "Embedding"}
    name, embedding = skeleton.embedding()
    assert name == "model.embed_tokens" and isinstance(embedding, nn.Embedding)
    assert skeleton.output_name() == "lm_head"
    assert skeleton.shape("model.layers.0.self_attn.k_proj") == (32, 64)
