"""Assignments: who gets what, and each refusal with its reason before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.assignment import Assignment, assign, block_needs, scale_dtype
from compress.errors import InputError
from compress.model import Skeleton, build_skeleton
from compress.recipe import parse
from tests.tiny import write_model

GPTQ = {"method": "gptq", "scheme": "W4A16", "group_size": 32}
RTN8 = {"method": "rtn", "scheme": "W8A16", "group_size": 32}


@pytest.fixture(scope="module")
def skeleton(tiny_llama: Path) -> Skeleton:
    return build_skeleton(tiny_llama)


def assigned(skeleton: Skeleton, *stages: dict[str, Any]) -> Assignment:
    return assign(parse({"version": 1, "stages": list(stages)}, "recipe.yaml"), skeleton)


def test_default_targets_are_the_linear_layers_of_the_blocks(skeleton: Skeleton) -> None:
    found = assigned(skeleton, {"quantize": GPTQ})
    assert len(found.layers) == 14 and "lm_head" not in found.layers
    assert found.untouched == {"lm_head": "outside the blocks"}
    assert found.layers["model.layers.1.mlp.down_proj"].shape == (64, 128)
    assert found.needs_calibration
    assert not assigned(skeleton, {"quantize": RTN8}).needs_calibration


def test_the_later_of_two_stages_holds_and_is_noted(skeleton: Skeleton) -> None:
    found = assigned(skeleton, {"quantize": GPTQ}, {"quantize": RTN8, "targets": ["*.self_attn.*"]})
    schemes = {name.split(".")[3]: task.scheme.name for name, task in found.layers.items()}
    assert schemes == {"self_attn": "W8A16", "mlp": "W4A16"}
    assert found.notes == ("recipe.yaml: stages.1 replaces the earlier scheme of 8 layers",)


def test_the_output_layer_is_quantized_only_by_name_and_without_calibration(skeleton: Skeleton, tmp_path: Path) -> None:
    found = assigned(skeleton, {"quantize": RTN8, "targets": ["lm_head"]})
    assert list(found.layers) == ["lm_head"]
    with pytest.raises(InputError, match="lm_head lies outside the blocks.*method rtn"):
        assigned(skeleton, {"quantize": GPTQ, "targets": ["lm_head"]})
    with pytest.raises(InputError, match="lm_head would part from the tied embedding"):
        tied = build_skeleton(write_model(tmp_path / "tied", tie_word_embeddings=True))
        assigned(tied, {"quantize": RTN8, "targets": ["lm_head"]})


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([{"quantize": {**GPTQ, "group_size": 48}}], "group_size: 48 does not divide the 64 columns.*use 64 or 32"),
        (
            [{"quantize": {**GPTQ, "group_size": 128}}],
            "128 does not divide the 64 columns.*11 more layers.*use 64 or 32",
        ),
        (
            [{"quantize": GPTQ, "targets": ["q_proj"]}],
            "q_proj is W4A16 and .*k_proj is not quantized.*give q_proj/k_proj/v_proj one scheme",
        ),
        (
            [{"quantize": {"method": "gptq", "scheme": "LLM_INT8"}}],
            "stages.0.quantize: method gptq cannot make LLM_INT8: use llm_int8, or change",
        ),
        (
            [{"quantize": {"method": "llm_int8", "scheme": "W8A8"}}],
            "method llm_int8 cannot make W8A8: use gptq or rtn, or change the scheme",
        ),
        ([{"quantize": GPTQ}, {"quantize": RTN8, "targets": ["up_proj"]}], "one scheme"),
        ([{"quantize": GPTQ, "targets": ["embed_tokens"]}], "embed_tokens: no scheme stores an embedding"),
        ([{"quantize": GPTQ, "targets": ["Embedding"]}], "no linear layer is left"),
        ([{"quantize": GPTQ, "targets": ["q_projj"]}], "did you mean 'q_proj'"),
        ([{"quantize": GPTQ, "ignore": ["nothing"]}], "ignore: 'nothing' matches no module"),
        ([{"quantize": GPTQ}, {"transform": {"method": "awq"}}], "put the transform stage first"),
        ([{"transform": {"method": "awq"}}], "no quantize or prune stage"),
        (
            [
                {"transform": {"method": "awq"}, "targets": ["*.mlp.*"]},
                {"quantize": GPTQ, "targets": ["*.self_attn.*"]},
            ],
            "none of its layers is quantized",
        ),
        ([{"transform": {"method": "awq"}, "targets": ["q_proj"]}, {"quantize": GPTQ}], "no pair of layers"),
    ],
)
def test_refusals(skeleton: Skeleton, stages: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        assigned(skeleton, *stages)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_transforms_keep_the_pairs_whose_consumers_are_quantized(skeleton: Skeleton) -> None:
    found = assigned(skeleton, {"transform": {"method": "awq"}}, {"quantize": GPTQ, "targets": ["*.mlp.*"]})
    (task,) = found.transforms
    assert [len(pairs) for pairs in task.pairs.values()] == [2, 2]
    assert found.notes == (), "attention, where nothing is quantized, is not worth a word"


def test_pairs_that_a_transform_leaves_out_are_noted(skeleton: Skeleton) -> None:
    found = assigned(skeleton, {"transform": {"method": "awq"}, "ignore": ["q_proj", "o_proj"]}, {"quantize": GPTQ})
    assert [len(pairs) for pairs in found.transforms[0].pairs.values()] == [2, 2]
    (note,) = found.notes
    assert "stages.0: awq leaves 4 of 8 pairs alone" in note and "model.layers.0.input_layernorm with" in note


def test_only_siblings_that_the_model_has_count(tmp_path: Path) -> None:
    """Nemotron's MLP has up_proj and no gate_proj."""
    found = assigned(build_skeleton(write_model(tmp_path / "model", "nemotron")), {"quantize": GPTQ})
    assert len(found.layers) == 12


def test_needs_of_transforms_count(skeleton: Skeleton) -> None:
    found = assigned(skeleton, {"transform": {"method": "awq"}, "targets": ["*.mlp.*"]}, {"quantize": RTN8})
    needs = block_needs(skeleton.block_linears(1), found, 1)
    assert [sorted(wanted) for wanted, _ in needs.values()] == [
        [],
        [],
        ["hessian", "mean_abs"],
        ["hessian", "mean_abs"],
    ]


@pytest.mark.parametrize(
    ("wish", "model", "expected"),
    [("auto", "bfloat16", "bfloat16"), ("auto", "float16", "float16"), ("auto", "float32", "bfloat16"),
     ("float32", "bfloat16", "float32")],
)  # fmt: skip
def test_scale_dtype(wish: str, model: str, expected: str) -> None:
    recipe = parse({"version": 1, "stages": [{"quantize": GPTQ}], "export": {"scale_dtype": wish}}, "recipe.yaml")
    assert scale_dtype(recipe, getattr(torch, model)) == getattr(torch, expected)
