"""The demo model compressed for real: it loads elsewhere bit for bit, and what was lost stays under its floor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress.checkpoint.quantization_config import stored_schemes
from compress.checkpoint.reader import open_checkpoint
from compress.eval.run import Request, evaluate
from compress.formats import format_named
from compress.formats.grid import dequantize
from compress.pipeline import RunOptions, run
from compress.recipe import parse
from compress.runtime.load import Execution, load_model
from tests.runtime.exact_twin import twin_hidden
from tests.test_pipeline import Silent

GRID = {"scheme": "W4A16", "group_size": 64}
STAGES: dict[str, list[dict[str, Any]]] = {
    "rtn": [{"quantize": {"method": "rtn", "search": "minmax", **GRID}}],
    "gptq": [{"quantize": {"method": "gptq", **GRID}}],
    "W8A8": [{"quantize": {"method": "rtn", "scheme": "W8A8"}}],
}


@pytest.fixture(scope="module")
def outputs(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("demo")
    calibration = {"source": str(demo_model / "texts" / "web.txt"), "samples": 8, "seqlen": 512}
    for name, stages in STAGES.items():
        document = {"version": 1, "model": str(demo_model), "output": str(root / name), "calibration": calibration}
        outcome = run(parse({**document, "stages": stages}, name), RunOptions(), Silent())
        assert outcome.manifest.fallbacks == []
    return {name: root / name for name in STAGES}


@pytest.mark.model
@pytest.mark.parametrize("name", ["gptq", "W8A8"])
def test_transformers_loads_the_same_weights_and_computes_the_same_logits(name: str, outputs: dict[str, Path]) -> None:
    folder = outputs[name]
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(0, 49_000, (1, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(ids).logits  # which also decompresses the weights
    checkpoint = open_checkpoint(folder)
    for module, scheme in stored_schemes(checkpoint).items():
        parts = {
            n.removeprefix(module + "."): checkpoint.read(n) for n in checkpoint.tensors if n.startswith(module + ".")
        }
        mine = dequantize(format_named(scheme.format).unpack(parts, scheme.grid))
        assert torch.equal(theirs.get_submodule(module).weight, mine), module
    model = load_model(folder, execution=Execution("reference"))
    logits = model.logits(model.hidden(ids))
    assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-3


@pytest.mark.model
def test_the_native_path_equals_its_twin_in_plain_torch(outputs: dict[str, Path]) -> None:
    """Bit for bit over 30 blocks, so that the divergence between them is 0.

    Nothing less would do: a last bit moves an activation over a rounding edge, the next layer moves a thousand, and
    after a few blocks two paths' rounding errors are as far from each other as from the exact product.
    """
    model = load_model(outputs["gptq"])
    ids = torch.randint(0, 49_000, (1, 136), generator=torch.Generator().manual_seed(0))  # two blocks of keys
    assert torch.equal(model.hidden(ids), twin_hidden(model, ids))


@pytest.mark.model
def test_gptq_loses_half_of_what_rounding_loses(outputs: dict[str, Path], demo_model: Path) -> None:
    """With a quarter of the demo's calibration tokens, and half of its held-out ones."""
    text = (demo_model / "texts" / "wiki.txt",)
    lost = {}
    for name in ("rtn", "gptq"):
        report = evaluate(Request(outputs[name], baseline=demo_model, texts=text, limit=2048, seconds=0.1))
        lost[name] = report["quality"]
        assert report["size"]["bits_per_weight"] == pytest.approx(4.25, abs=0.01)
    assert lost["gptq"]["kl_mean"] < 0.25 and lost["gptq"]["ppl_ratio"] < 1.3
    assert lost["gptq"]["kl_mean"] < 0.6 * lost["rtn"]["kl_mean"]
    assert lost["gptq"]["top1_agreement"] > 0.73
