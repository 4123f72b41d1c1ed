"""Calibration passes against the whole model run at once: the same inputs, the same hidden states, block by block."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress.activations import ActivationBuffer
from compress.calibrate import Calibration, collect, embed, propagate
from compress.model import FAMILIES, Skeleton, build_skeleton, input_groups, materialized
from tests.tiny import write_model

TOKENS = torch.randint(0, 256, (5, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=[*FAMILIES, "gpt_neox"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibrate") / "model"
    return write_model(path, request.param, dtype=torch.float32, query_pre_attn_scalar=16, sliding_window=8)


def start(folder: Path, model: torch.nn.Module, work: Path, budget: int = 1 << 20) -> tuple[Skeleton, Calibration]:
    skeleton = build_skeleton(folder)
    _, embedding = skeleton.embedding()
    with materialized(embedding, dict(model.get_input_embeddings().state_dict())):
        return skeleton, embed(skeleton, TOKENS, 2, ActivationBuffer(budget, work))


@pytest.mark.parametrize("budget", [0, 1 << 20], ids=["spilled", "in memory"])
def test_walk_equals_the_whole_model(folder: Path, tmp_path: Path, budget: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        states = model(TOKENS, output_hidden_states=True).hidden_states
    skeleton, calibration = start(folder, model, tmp_path, budget)
    assert len(calibration.hidden) == 3, "five sequences by two, the last one alone"
    assert torch.equal(torch.cat(list(calibration.hidden)), states[0])
    for index, name in enumerate(skeleton.blocks[:-1]):
        with materialized(skeleton.block(index), dict(model.get_submodule(name).state_dict())):
            propagate(skeleton, index, calibration, {})
        assert torch.allclose(torch.cat(list(calibration.hidden)), states[index + 1], atol=1e-5)


def test_statistics_are_of_the_inputs_that_the_model_computes(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    skeleton, calibration = start(folder, model, tmp_path)
    groups = input_groups(skeleton.block_linears(0))
    seen: dict[str, list[Tensor]] = {}
    for group in groups:
        module = model.get_submodule(group[0])
        module.register_forward_pre_hook(lambda _, inputs, name=group[0]: seen.setdefault(name, []).append(inputs[0]))
    with torch.no_grad():
        model(TOKENS)
    needs = {group: (frozenset({"hessian", "absmax"}), None) for group in groups}
    with materialized(skeleton.block(0), dict(model.get_submodule(skeleton.blocks[0]).state_dict())):
        stats = collect(skeleton, 0, calibration, needs)
    assert set(stats) == set(groups)
    for group, found in stats.items():
        x = seen[group[0]][0].flatten(0, 1).double()
        assert found.tokens == TOKENS.numel() == len(x)
        assert found.hessian is not None and found.absmax is not None
        assert torch.allclose(found.hessian.double(), x.T @ x / len(x), atol=1e-5, rtol=1e-4)
        assert torch.allclose(found.absmax.double(), x.abs().amax(0), atol=1e-5)


def test_nothing_is_run_where_nothing_is_needed(tiny_llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    skeleton, calibration = start(tiny_llama, model, tmp_path)
    groups = input_groups(skeleton.block_linears(0))
    # The block is still on the meta device: a pass over it would fail.
    assert collect(skeleton, 0, calibration, {group: (frozenset(), None) for group in groups}) == {}


def test_inputs_are_rounded_where_the_scheme_rounds_them(tiny_llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    skeleton, calibration = start(tiny_llama, model, tmp_path)
    name = "model.layers.0.mlp.down_proj"
    module = model.get_submodule(name)
    module.register_forward_pre_hook(lambda _, inputs: (inputs[0].round(decimals=1),))
    with torch.no_grad():
        expected = model(TOKENS, output_hidden_states=True).hidden_states[1]
    weights = {k: v.float() for k, v in model.get_submodule(skeleton.blocks[0]).state_dict().items()}
    with materialized(skeleton.block(0), weights):
        propagate(skeleton, 0, calibration, {name: lambda x: x.round(decimals=1)})
    assert torch.allclose(torch.cat(list(calibration.hidden)), expected, atol=1e-5)
