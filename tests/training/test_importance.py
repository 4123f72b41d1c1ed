"""Importances against hooks on the whole model of transformers, token by token."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress.checkpoint.reader import open_checkpoint
from compress.errors import InputError
from compress.model import FAMILIES, build_skeleton
from compress.shrink import MEASURED
from compress.training import importance
from tests.tiny import write_model

TOKENS = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def float32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs with units for bfloat16 would multiply in it, and the oracle does not."""
    monkeypatch.setattr(importance, "arithmetic", lambda device: torch.float32)


def found(folder: Path, work: Path, wanted: frozenset[str] = frozenset(MEASURED)) -> dict[str, Tensor]:
    source, skeleton = open_checkpoint(folder), build_skeleton(folder)
    calibration = importance.embedded(source, skeleton, TOKENS, work, CPU)
    steps: list[tuple[int, int]] = []
    result = importance.measure(source, skeleton, calibration, wanted, CPU, lambda *step: steps.append(step))
    assert steps == [(index + 1, 3) for index in range(3)]
    assert all(parameter.is_meta for parameter in skeleton.model.parameters()), "no block stays in memory"
    return result


def cosine(one: Tensor, other: Tensor) -> float:
    products = [float(a) * float(b) for a, b in zip(one, other, strict=True)]
    lengths = [math.sqrt(sum(float(value) ** 2 for value in vector)) for vector in (one, other)]
    return sum(products) / (lengths[0] * lengths[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_importances_equal_a_slow_oracle(family: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", family, num_hidden_layers=3, query_pre_attn_scalar=16, sliding_window=8)
    measured = found(folder, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(("down_proj", "o_proj")):
            module.register_forward_pre_hook(lambda _, inputs, name=name: seen.update({name: inputs[0].flatten(0, 1)}))
        if name.rpartition(".")[2].isdecimal():
            module.register_forward_hook(
                lambda _, inputs, output, name=name: seen.update(
                    {f"{name} in": inputs[0].flatten(0, 1), f"{name} out": output.flatten(0, 1)}
                )
            )
    with torch.no_grad():
        model(TOKENS)
    tokens = TOKENS.numel()
    for layer in range(3):
        name = f"model.layers.{layer}"
        before, after = seen[f"{name} in"], seen[f"{name} out"]
        influence = sum(1 - cosine(before[token], after[token]) for token in range(tokens)) / tokens
        assert float(measured["block_influence"][layer]) == pytest.approx(influence, rel=1e-4, abs=1e-6)
        active = seen[f"{name}.mlp.down_proj"].double()
        heads = torch.stack(
            [part.double().norm(dim=1) for part in seen[f"{name}.self_attn.o_proj"].split(16, dim=1)], 1
        )
        for kind, sizes in (("channel", active.abs()), ("head", heads)):
            assert torch.allclose(measured[f"{kind}_mean"][layer], sizes.mean(0), rtol=1e-4, atol=1e-6)
            assert torch.allclose(measured[f"{kind}_l2"][layer], sizes.square().mean(0).sqrt(), rtol=1e-4, atol=1e-6)
    assert measured["channel_l2"].shape == (3, 128) and measured["head_l2"].shape == (3, 4)


def test_only_what_is_wanted_is_measured(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", num_hidden_layers=3)
    assert set(found(folder, tmp_path, frozenset({"head_mean"}))) == {"head_mean"}


def test_batches_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "model", num_hidden_layers=3)
    whole = found(folder, tmp_path)
    monkeypatch.setattr(importance, "TOKENS_PER_BATCH", 48)
    monkeypatch.setattr(importance, "ACTIVATION_BUDGET", 0)  # two batches of unequal size, both spilled
    split = found(folder, tmp_path)
    assert (tmp_path / "activations.spill").exists()
    for name, values in whole.items():
        assert torch.allclose(values, split[name], rtol=1e-5, atol=1e-7)


def test_a_block_that_overflows_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", num_hidden_layers=3)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.inf
    model.save_pretrained(folder)
    with pytest.raises(InputError, match="model.layers.1 gives values that are not finite: check its weights"):
        found(folder, tmp_path)
