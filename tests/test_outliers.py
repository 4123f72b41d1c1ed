"""LLM.int8() on a real model with emergent outliers put in: small models have none of their own.

Six input channels of every block are scaled up, their norm's gain times 20 to 60 and the weights that read them down by
as much: the same function in exact arithmetic, with activations that ruin an int8 step per token.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.eval.run import Request, evaluate
from compress.pipeline import RunOptions, run
from compress.recipe import parse
from tests.test_pipeline import Silent

CHANNELS, LOW, HIGH = 6, 20, 60
READERS = {"input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
           "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj")}  # fmt: skip


def inject(model: Path, folder: Path) -> tuple[Path, dict[str, list[int]]]:
    """A copy of `model` with outlier channels, and per layer the channels it then reads."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("texts", "*.safetensors"))
    weights = {name: tensor.float() for name, tensor in load_file(model / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(0)
    injected: dict[str, list[int]] = {}
    blocks = sorted({name.rpartition(".input_layernorm")[0] for name in weights if "input_layernorm" in name})
    for block in blocks:
        for norm, readers in READERS.items():
            gain = weights[f"{block}.{norm}.weight"]
            # Channels of ordinary gain, so that the factor makes outliers of them.
            strong = gain.abs().argsort(descending=True)[: len(gain) // 2]
            channels = strong[torch.randperm(len(strong), generator=generator)[:CHANNELS]].sort().values
            factor = torch.rand(CHANNELS, generator=generator) * (HIGH - LOW) + LOW
            gain[channels] *= factor
            for reader in readers:
                weights[f"{block}.{reader}.weight"][:, channels] /= factor
                injected[f"{block}.{reader}"] = channels.tolist()
    stored = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder, injected


@pytest.fixture(scope="module")
def measured(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Reports and manifests of W8A8 and LLM_INT8 on the model with outliers."""
    root = tmp_path_factory.mktemp("outliers")
    model, injected = inject(demo_model, root / "model")
    found: dict[str, Any] = {"injected": injected}
    for scheme, method in (("W8A8", "rtn"), ("LLM_INT8", "llm_int8")):
        document = {
            "version": 1,
            "model": str(model),
            "output": str(root / scheme),
            "calibration": {"source": str(demo_model / "texts" / "web.txt"), "samples": 8, "seqlen": 256},
            "stages": [{"quantize": {"method": method, "scheme": scheme}}],
        }
        outcome = run(parse(document, scheme), RunOptions(), Silent())
        text = (demo_model / "texts" / "wiki.txt",)
        found[scheme] = evaluate(Request(root / scheme, baseline=model, texts=text, limit=2048, seconds=0.1))
        found[f"{scheme} layers"] = {layer["name"]: layer for layer in outcome.manifest.layers}
    return found


@pytest.mark.model
def test_w8a8_loses_visibly_and_llm_int8_does_not(measured: dict[str, Any]) -> None:
    assert measured["W8A8"]["quality"]["ppl_ratio"] > 1.05
    assert measured["LLM_INT8"]["quality"]["ppl_ratio"] == pytest.approx(1.0, abs=0.005)
    assert measured["LLM_INT8"]["quality"]["kl_mean"] < 0.2 * measured["W8A8"]["quality"]["kl_mean"]


@pytest.mark.model
def test_the_injected_columns_are_named(measured: dict[str, Any]) -> None:
    layers = measured["LLM_INT8 layers"]
    wanted = [(name, channel) for name, channels in measured["injected"].items() for channel in channels]
    found = [pair for pair in wanted if pair[1] in layers[pair[0]]["outlier_columns"]]
    assert len(found) > 0.95 * len(wanted)
    kept = sum(len(layer["outlier_columns"]) for layer in layers.values())
    assert kept < 1.3 * len(wanted), "columns that nobody injected"


@pytest.mark.model
def test_the_report_counts_what_the_columns_miss(measured: dict[str, Any]) -> None:
    misses = [layer["outlier_misses"] for layer in measured["LLM_INT8"]["layers"]]
    assert all(miss["seen"] > 0 for miss in misses)
    assert 0 < sum(miss["over"] for miss in misses) < 0.01 * sum(miss["seen"] for miss in misses)
