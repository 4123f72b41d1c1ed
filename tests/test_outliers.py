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


RUNS = {
    "W8A8": {"method": "rtn", "scheme": "W8A8"},
    "default": {"method": "llm_int8", "scheme": "LLM_INT8"},
    "sensitive": {"method": "llm_int8", "scheme": "LLM_INT8", "threshold": 2.0, "share": 0.01},
}


@pytest.fixture(scope="module")
def measured(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Reports and manifests of W8A8 and LLM_INT8 on the model with outliers."""
    root = tmp_path_factory.mktemp("outliers")
    model, injected = inject(demo_model, root / "model")
    found: dict[str, Any] = {"injected": injected}
    for name, stage in RUNS.items():
        document = {
            "version": 1,
            "model": str(model),
            "output": str(root / name),
            "calibration": {"source": str(demo_model / "texts" / "web.txt"), "samples": 8, "seqlen": 256},
            "stages": [{"quantize": stage}],
        }
        outcome = run(parse(document, name), RunOptions(), Silent())
        text = (demo_model / "texts" / "wiki.txt",)
        found[name] = evaluate(Request(root / name, baseline=model, texts=text, limit=4096, seconds=0.1))
        found[f"{name} layers"] = {layer["name"]: layer for layer in outcome.manifest.layers}
    return found


@pytest.mark.model
def test_w8a8_loses_visibly_and_llm_int8_does_not(measured: dict[str, Any]) -> None:
    """The default threshold is made for larger models, whose activations are larger; at 2.0 next to nothing is lost."""
    plain, default, sensitive = (measured[name]["quality"] for name in RUNS)
    assert plain["ppl_ratio"] > 1.2 and plain["kl_mean"] > 0.2
    assert default["ppl_ratio"] < 1.03 and default["kl_mean"] < 0.04
    # Half a per cent, and the paired standard error of what 4,096 tokens can tell.
    assert abs(sensitive["ppl_ratio"] - 1) < 0.005 + sensitive["ppl_ratio_stderr"]
    assert sensitive["kl_mean"] < 0.015


@pytest.mark.model
def test_the_injected_columns_are_named(measured: dict[str, Any]) -> None:
    wanted = [(name, channel) for name, channels in measured["injected"].items() for channel in channels]
    for run_name, least, most in (("default", 0.93, 3.0), ("sensitive", 0.99, 15.0)):
        layers = measured[f"{run_name} layers"]
        found = [pair for pair in wanted if pair[1] in layers[pair[0]]["outlier_columns"]]
        assert len(found) > least * len(wanted), run_name
        kept = sum(len(layer["outlier_columns"]) for layer in layers.values())
        assert kept < most * len(wanted), run_name


@pytest.mark.model
def test_the_report_counts_what_the_columns_miss(measured: dict[str, Any]) -> None:
    for run_name in ("default", "sensitive"):
        misses = [layer["outlier_misses"] for layer in measured[run_name]["layers"]]
        assert all(miss["seen"] > 0 for miss in misses)
        assert 0 < sum(miss["over"] for miss in misses) < 0.01 * sum(miss["seen"] for miss in misses)
