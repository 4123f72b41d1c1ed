"""Calibration passes against the whole model run at once: the same inputs, the same hidden states, block by block."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress.activations import ActivationBuffer
from compress.calibrate import Calibration, arithmetic, collect, embed, propagate
from compress.model import FAMILIES, Skeleton, build_skeleton, input_groups, materialized
from tests.tiny import write_model

TOKENS = torch.randint(0, 256, (5, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=[*FAMILIES, "gpt_neox"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibrate") / "model"
    return write_model(path, request.param, dtype=torch.bfloat16, query_pre_attn_scalar=16, sliding_window=8)


def hidden(calibration: Calibration) -> Tensor:
    return torch.cat([calibration.hidden[n] for n in range(len(calibration.hidden))])


def start(folder: Path, model: torch.nn.Module, work: Path, budget: int = 1 << 20) -> tuple[Skeleton, Calibration]:
    skeleton = build_skeleton(folder)
    _, embedding = skeleton.embedding()
    # In 16 bit, as most checkpoints have it; the weights are such that nothing is lost.
    state = {name: weight.to(torch.bfloat16) for name, weight in model.get_input_embeddings().state_dict().items()}
    with materialized(embedding, state):
        return skeleton, embed(skeleton, TOKENS, 2, ActivationBuffer(budget, work))


@pytest.mark.parametrize("budget", [0, 1 << 20], ids=["spilled", "in memory"])
def test_walk_equals_the_whole_model(folder: Path, tmp_path: Path, budget: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        states = model(TOKENS, output_hidden_states=True).hidden_states
    skeleton, calibration = start(folder, model, tmp_path, budget)
    assert len(calibration.hidden) == 3, "five sequences by two, the last one alone"
    assert torch.equal(hidden(calibration), states[0])
    for index, name in enumerate(skeleton.blocks[:-1]):
        with materialized(skeleton.block(index), dict(model.get_submodule(name).state_dict())):
            propagate(skeleton, index, calibration, {})
        assert torch.allclose(hidden(calibration), states[index + 1], atol=1e-5)


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
    assert torch.allclose(hidden(calibration), expected, atol=1e-5)


def test_sixteen_bit_products_stay_close_and_leave_float32_states(tiny_llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    skeleton, calibration = start(tiny_llama, model, tmp_path)
    fast = replace(calibration, arithmetic=torch.bfloat16)
    with torch.no_grad():
        expected = model(TOKENS, output_hidden_states=True).hidden_states[1]
    weights = {k: v.float() for k, v in model.get_submodule(skeleton.blocks[0]).state_dict().items()}
    with materialized(skeleton.block(0), weights):
        groups = input_groups(skeleton.block_linears(0))
        exact = collect(skeleton, 0, calibration, {group: (frozenset({"hessian"}), None) for group in groups})
        mine = collect(skeleton, 0, fast, {group: (frozenset({"hessian"}), None) for group in groups})
        propagate(skeleton, 0, fast, {})
    states = hidden(fast)
    assert states.dtype == torch.float32
    assert 30 < decibels(expected, states) < 80, "bfloat16 has 8 bits, and was it used?"
    for group in groups:
        found, wanted = mine[group].hessian, exact[group].hessian
        assert found is not None and wanted is not None and decibels(wanted, found) > 35


def decibels(signal: Tensor, other: Tensor) -> float:
    return float(10 * torch.log10(signal.square().sum() / (signal - other).square().sum().clamp(min=1e-30)))


def test_devices_without_units_for_bfloat16_multiply_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    for capabilities, expected in (({"avx2": True}, torch.float32), ({"amx_bf16": True}, torch.bfloat16)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        assert arithmetic(torch.device("cpu")) == expected
