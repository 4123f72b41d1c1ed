"""Assignments: who gets what, and each refusal with its reason before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.assignment import Assignment, assign, scale_dtype
from compress.errors import InputError
from compress.model import Skeleton, build_skeleton
from compress.recipe import parse

GPTQ = {"method": "gptq", "scheme": "W4A16", "group_size": 32}
RTN8 = {"method": "rtn", "scheme": "W8A16", "group_size": 32}


@pytest.fixture(scope="module")
def skeleton(tiny_llama: Path) -> Skeleton:
    return build_skeleton(tiny_llama)


def assigned(skeleton: Skeleton, *stages: dict[str, Any], tied: bool = False) -> Assignment:
    return assign(parse({"version": 1, "stages": list(stages)}, "recipe.yaml"), skeleton, tied)


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


def test_the_output_layer_is_quantized_only_by_name_and_without_calibration(skeleton: Skeleton) -> None:
    found = assigned(skeleton, {"quantize": RTN8, "targets": ["lm_head"]})
    assert list(found.layers) == ["lm_head"]
    with pytest.raises(InputError, match="lm_head lies outside the blocks.*method rtn"):
        assigned(skeleton, {"quantize": GPTQ, "targets": ["lm_head"]})
    with pytest.raises(InputError, match="lm_head would part from the tied embedding"):
        assigned(skeleton, {"quantize": RTN8, "targets": ["lm_head"]}, tied=True)


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
            "q_proj is W4A16 and .*k_proj is not quantized.*give q_proj/k_proj",
        ),
        ([{"quantize": GPTQ}, {"quantize": RTN8, "targets": ["up_proj"]}], "one scheme"),
        ([{"quantize": GPTQ, "targets": ["embed_tokens"]}], "embed_tokens: no scheme stores an embedding"),
        ([{"quantize": GPTQ, "targets": ["Embedding"]}], "no linear layer is left"),
        ([{"quantize": GPTQ, "targets": ["q_projj"]}], "did you mean 'q_proj'"),
        ([{"quantize": GPTQ, "ignore": ["nothing"]}], "ignore: 'nothing' matches no module"),
        ([{"quantize": GPTQ}, {"transform": {"method": "awq"}}], "put the transform first"),
        ([{"transform": {"method": "awq"}}], "no quantize stage"),
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


@pytest.mark.parametrize(
    ("wish", "model", "expected"),
    [("auto", "bfloat16", "bfloat16"), ("auto", "float16", "float16"), ("auto", "float32", "bfloat16"),
     ("float32", "bfloat16", "float32")],
)  # fmt: skip
def test_scale_dtype(wish: str, model: str, expected: str) -> None:
    recipe = parse({"version": 1, "stages": [{"quantize": GPTQ}], "export": {"scale_dtype": wish}}, "recipe.yaml")
    assert scale_dtype(recipe, getattr(torch, model)) == getattr(torch, expected)
