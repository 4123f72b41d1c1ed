"""One block: transforms keep its function, layers that share inputs are solved together, errors are told truly."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress.assignment import LayerTask, assign, block_needs
from compress.block import Block, output_error, quantize_groups, rounding_of
from compress.formats import format_named
from compress.formats.grid import dequantize
from compress.model import FAMILIES, Pair, build_skeleton, input_groups, pairs
from compress.quantize.scales import round_to_grid
from compress.recipe import parse
from compress.stats import InputStats
from tests.tiny import write_model

PREFIX = "model.layers.0."


def block_of(model: torch.nn.Module, dtype: torch.dtype) -> Block:
    weights = {f"{PREFIX}{name}": p.detach().clone() for name, p in model.get_submodule(PREFIX[:-1]).named_parameters()}
    return Block(weights, {}, dict.fromkeys(weights, dtype))


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2 with biases"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_folding_keeps_the_function(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", family.split()[0], query_pre_attn_scalar=16, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data.add_(0.2 * torch.randn(parameter.shape, generator=generator)).copy_(
                parameter.data.to(torch.bfloat16)
            )
    ids = torch.randint(0, 256, (2, 24), generator=generator)
    with torch.no_grad():
        before = model(ids).logits
    block = block_of(model, dtype)
    for pair in pairs(build_skeleton(folder), 0):
        columns = block.weights[f"{pair.consumers[0]}.weight"].shape[1]
        applied = block.fold(pair, torch.rand(columns, generator=generator).mul(3).add(0.2))
        assert float(applied.std()) > 0.1, "nothing moved"
    model.get_submodule(PREFIX[:-1]).load_state_dict({k.removeprefix(PREFIX): v for k, v in block.weights.items()})
    with torch.no_grad():
        after = model(ids).logits
    # Norms are rounded to the stored dtype, and the consumers follow the rounded value: the function is kept exactly.
    assert float((after - before).abs().max() / before.abs().max()) < 1e-5


def test_channels_without_gain_do_not_move() -> None:
    weights = {"norm.weight": torch.tensor([0.0, 2.0]), "linear.weight": torch.ones(3, 2)}
    block = Block(weights, {}, {"norm.weight": torch.float32})
    applied = block.fold(Pair("norm", ("linear",), "norm"), torch.tensor([4.0, 4.0]))
    assert applied.tolist() == [1.0, 4.0] and weights["norm.weight"].tolist() == [0.0, 0.5]


def tasks_for(folder: Path, stages: list[dict[str, object]]) -> dict[str, LayerTask]:
    return assign(parse({"version": 1, "stages": stages}, "r"), build_skeleton(folder)).layers


def test_siblings_are_solved_as_one_matrix_and_told_apart(tiny_llama: Path) -> None:
    layers = tasks_for(tiny_llama, [{"quantize": {"method": "gptq", "scheme": "W4A16", "group_size": 32}}])
    linears = build_skeleton(tiny_llama).block_linears(0)
    batches = quantize_groups(linears, layers)
    assert [[task.name.rpartition(".")[2] for task in batch] for batch in batches] == [
        ["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    weights = {f"{t.name}.weight": torch.randn(t.shape, generator=generator) for t in batches[0]}
    x = torch.randn(300, 64, generator=generator)
    stats = InputStats(tokens=300, hessian=x.T @ x / 300)
    together, reports = Block(dict(weights), {tuple(t.name for t in batches[0]): stats}, {}).quantize(
        batches[0], torch.bfloat16
    )
    for task, report in zip(batches[0], reports, strict=True):
        alone, _ = Block(dict(weights), {(task.name,): stats}, {}).quantize([task], torch.bfloat16)
        assert all(torch.equal(tensor, together[name]) for name, tensor in alone.items())
        parts = {n.removeprefix(task.name + "."): t for n, t in alone.items()}
        decoded = dequantize(format_named(task.scheme.format).unpack(parts, task.scheme.grid))
        y, mine = x @ weights[f"{task.name}.weight"].T, x @ decoded.T
        expected = 10 * math.log10(float(y.square().sum() / (y - mine).square().sum()))
        assert report.error_db == pytest.approx(expected, abs=0.01) and report.error_of == "output"
        assert report.tokens == 300 and report.damping == 0.01


def test_needs_are_joined_over_stages(tiny_llama: Path) -> None:
    skeleton = build_skeleton(tiny_llama)
    stages = [
        {"transform": {"method": "smoothquant"}, "targets": ["*.mlp.*"]},
        {"quantize": {"method": "llm_int8", "scheme": "LLM_INT8"}, "targets": ["*.mlp.*"]},
    ]
    assignment = assign(parse({"version": 1, "stages": stages}, "r"), skeleton)
    needs = block_needs(skeleton.block_linears(0), assignment, 0)
    assert [needs[group] for group in input_groups(skeleton.block_linears(0))] == [
        (frozenset(), None), (frozenset(), None), ({"absmax", "outliers"}, 6.0), ({"absmax", "outliers"}, 6.0)
    ]  # fmt: skip


def test_error_of_nothing_and_of_everything() -> None:
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    assert output_error(weight, weight, None) == (200.0, "weight")
    assert output_error(torch.zeros(4, 8), weight, None) == (-200.0, "weight")
    assert output_error(weight, torch.zeros(4, 8), None)[0] == pytest.approx(0.0)


def test_rounding_tells_a_transform_what_follows(tiny_llama: Path) -> None:
    stages: list[dict[str, object]] = [
        {"quantize": {"method": "gptq", "scheme": "W4A16", "group_size": 32, "damping": 0.05}}
    ]
    task = next(iter(tasks_for(tiny_llama, stages).values()))
    rounding = rounding_of(task, torch.bfloat16)
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    rounded: Tensor = rounding.nearest(weight, None)
    assert rounding.damping == 0.05
    assert 18 < output_error(weight, rounded, None)[0] < 24
    assert rounded.view(8, 2, 32)[0, 0].unique().numel() <= 16
    assert round_to_grid(rounded, torch.ones(8, 2), None, task.scheme.grid).dtype == torch.int8
