"""Permuted channels: the search against all orders there are, the function it keeps, and what a model gains."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress.assignment import assign
from compress.block import Block
from compress.checkpoint import manifest
from compress.errors import InputError
from compress.model import FAMILIES, build_skeleton, pairs
from compress.pipeline import RunOptions, run
from compress.recipe import parse
from compress.stats import InputStats
from compress.transform.permute import Config, order, retained, search
from tests.test_block import PREFIX, block_of
from tests.test_pipeline import Silent, quantize, recipe
from tests.tiny import write_model


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def slow_retained(values: Tensor) -> float:
    """Two largest of every four channels [K, R], row by row."""
    total = 0.0
    for row in values.T.tolist():
        for start in range(0, len(row), 4):
            total += sum(sorted(row[start : start + 4])[2:])
    return total


def test_one_round_finds_the_best_of_all_orders_of_eight() -> None:
    values = torch.rand(8, 5, generator=seeded(), dtype=torch.float64)
    found = search(values, 1, seeded())
    best = max(slow_retained(values[list(some)]) for some in permutations(range(8)) if some[0] == 0)
    assert slow_retained(values[found]) == pytest.approx(best, rel=1e-12)
    assert sorted(found.tolist()) == list(range(8))


def test_no_round_makes_it_worse_and_a_group_may_sit_out() -> None:
    values = torch.rand(36, 20, generator=seeded(1)).square()
    kept = [float(retained(values[search(values, rounds, seeded(2))].view(-1, 4, 20)).sum()) for rounds in range(8)]
    assert all(later >= earlier for earlier, later in zip(kept, kept[1:], strict=False))
    assert kept[-1] > 1.02 * kept[0]
    assert kept[0] == pytest.approx(slow_retained(values), rel=1e-5)


def test_heads_of_one_unit_share_its_order() -> None:
    """Two units of 8 channels, read by 2 heads each: what counts is the sum over both heads."""
    weight, stats = (
        torch.randn(6, 32, generator=seeded()),
        InputStats(1, mean_square=torch.rand(32, generator=seeded(1))),
    )
    found = order([weight], stats, Config(rounds=1), (2, 8))
    assert found.shape == (2, 8)
    values = (weight.square() * stats.mean_square).T
    generator = seeded()
    for unit, mine in enumerate(found):
        both = torch.cat([values[unit * 16 : unit * 16 + 8], values[unit * 16 + 8 : unit * 16 + 16]], dim=1)
        assert mine.tolist() == search(both, 1, generator).tolist()


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2 with biases"])
def test_permuting_keeps_the_function(family: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", family.split()[0], query_pre_attn_scalar=16, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(generator=seeded())
    ids = torch.randint(0, 256, (2, 24), generator=seeded())
    with torch.no_grad():
        before = model(ids).logits
    block: Block = block_of(model, torch.float32)
    moved = 0
    for pair in (pair for pair in pairs(build_skeleton(folder), 0) if pair.kind == "linear"):
        columns = block.weights[f"{pair.consumers[0]}.weight"].shape[1]
        size = pair.head_size if pair.repeat * pair.head_size > 1 else columns
        units = columns // pair.repeat // size
        chosen = torch.stack([torch.randperm(size, generator=seeded(unit)) for unit in range(units)])
        moved += int((block.permute(pair, chosen) != torch.arange(columns)).sum())
    assert moved > 100
    model.get_submodule(PREFIX[:-1]).load_state_dict({k.removeprefix(PREFIX): v for k, v in block.weights.items()})
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, before, atol=1e-5 * float(before.abs().max()))


def test_statistics_follow(tmp_path: Path) -> None:
    hessian = torch.randn(8, 8, generator=seeded())
    stats = InputStats(3, absmax=torch.arange(8.0), mean_square=torch.arange(8.0) + 1, hessian=hessian @ hessian.T)
    moved = stats.permuted(torch.tensor([3, 1, 0, 2, 7, 6, 5, 4]))
    assert moved.absmax is not None and moved.absmax.tolist() == [3, 1, 0, 2, 7, 6, 5, 4]
    assert stats.hessian is not None and moved.hessian is not None
    assert float(moved.hessian[0, 4]) == float(stats.hessian[3, 7])


def test_a_permuted_model_loses_less(tiny_text: Path, tmp_path: Path) -> None:
    """Columns of which a mask would drop large ones: four loud channels side by side, in a row of quiet ones."""
    folder = write_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.view(64, -1, 16)[:, :, :4] *= 6
    model.save_pretrained(folder)
    errors = {}
    for name, first in (("plain", []), ("permuted", [{"transform": {"method": "permute"}}])):
        stages = [*first, {"prune": {"method": "sparsegpt"}}, quantize()]
        done = run(recipe(folder, tmp_path / name, tiny_text, *stages), RunOptions(device="cpu"), Silent())
        rows = manifest.read(done.folder).layers
        errors[name] = [row["error_db"] for row in rows if row["name"].endswith("down_proj")]
        transforms = {row["name"].rpartition(".")[2]: row["transforms"] for row in rows}
        assert transforms["down_proj"] == [one["transform"]["method"] for one in first] == transforms["o_proj"]
        assert transforms["up_proj"] == []
    assert all(after > before + 3 for before, after in zip(errors["plain"], errors["permuted"], strict=True)), errors


def test_it_serves_pruned_layers_alone(tiny_llama: Path, tmp_path: Path) -> None:
    skeleton = build_skeleton(tiny_llama)
    permute = {"transform": {"method": "permute"}}
    with pytest.raises(InputError, match="none of its layers is pruned to 2:4 by a later stage: leave it out"):
        assign(parse({"version": 1, "stages": [permute, quantize()]}, "r.yaml"), skeleton)
    mlp = {"prune": {"method": "magnitude"}, "targets": ["*.mlp.*"]}
    made = assign(parse({"version": 1, "stages": [permute, mlp]}, "r.yaml"), skeleton)
    assert [[pair.consumers[0].rpartition(".")[2] for pair in made.transforms[0].pairs[0]]] == [["down_proj"]]
