"""Dense checkpoints: transformers computes from them what our runtime computes from the packed one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from compress.checkpoint import open_checkpoint
from compress.checkpoint.interop import dense
from compress.checkpoint.interop.exported import Exported
from compress.checkpoint.quantization_config import stored_schemes
from compress.checkpoint.source import dequantized
from compress.errors import InputError
from compress.formats.scheme import scheme_named
from compress.runtime.load import Execution, load_model
from tests.runtime.packing import write_packed

SCHEMES = [
    scheme_named("W4A16", 32),
    scheme_named("W4A16_ASYM", 32),
    scheme_named("W8A16", 32),
    scheme_named("W8A8"),
    scheme_named("LLM_INT8"),
]


def exported(folder: Path, output: Path, kind: str = "auto", restart: bool = False) -> Exported:
    checkpoint = open_checkpoint(folder)
    return dense.export(checkpoint, stored_schemes(checkpoint), output, kind, restart)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_weights_are_what_the_packed_ones_stand_for(scheme: object, tiny_llama: Path, tmp_path: Path) -> None:
    folder = write_packed(tiny_llama, tmp_path / "packed", scheme, outliers=3)  # type: ignore[arg-type]
    done = exported(folder, tmp_path / "out", "F32")
    checkpoint = open_checkpoint(folder)
    meant = dequantized(checkpoint, stored_schemes(checkpoint), torch.float32)
    found = load_file(done.output / "model.safetensors")
    assert found.keys() == meant.tensors.keys() == load_file(tiny_llama / "model.safetensors").keys()
    for name, tensor in found.items():
        assert tensor.dtype is torch.float32 and torch.equal(tensor, meant.read(name).float()), name
    assert done.nbytes == sum(tensor.nbytes for tensor in found.values()) and not done.notes


@pytest.mark.parametrize("kind", ["F32", "auto"])
def test_transformers_gives_our_logits(kind: str, tiny_llama: Path, tmp_path: Path) -> None:
    folder = write_packed(tiny_llama, tmp_path / "packed", scheme_named("W4A16", 32))
    done = exported(folder, tmp_path / "out", kind)
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForCausalLM.from_pretrained(done.output, dtype=torch.float32)
    # F32 holds the packed weights exactly; the model's own bfloat16 rounds them, so it is held against itself.
    ours = load_model(folder if kind == "F32" else done.output, execution=Execution(kernels="reference"))
    with torch.inference_mode():
        assert torch.allclose(theirs(tokens).logits, ours.logits(ours.hidden(tokens)), atol=2e-5)
    assert AutoTokenizer.from_pretrained(done.output)("a press").input_ids
    config = json.loads((done.output / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == ("float32" if kind == "F32" else "bfloat16")
    assert bool(done.notes) == (kind == "auto")


def test_a_killed_export_goes_on(tiny_llama: Path, tmp_path: Path) -> None:
    folder = write_packed(tiny_llama, tmp_path / "packed", scheme_named("W4A16", 32))
    whole = exported(folder, tmp_path / "whole").output
    checkpoint, steps = open_checkpoint(folder), []

    def killed(stage: str, done: int, total: int) -> None:
        steps.append(done)
        if len(steps) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dense.export(checkpoint, stored_schemes(checkpoint), tmp_path / "out", progress=killed)
    assert not (tmp_path / "out").exists() and (tmp_path / "out.partial").exists()
    again = exported(folder, tmp_path / "out").output
    assert {file.name: file.read_bytes() for file in again.iterdir()} == {
        file.name: file.read_bytes() for file in whole.iterdir()
    }


def test_what_is_there_stays(tiny_llama: Path, tmp_path: Path) -> None:
    folder = write_packed(tiny_llama, tmp_path / "packed", scheme_named("W4A16", 32))
    output = exported(folder, tmp_path / "out").output
    assert "it was there already" in exported(folder, tmp_path / "out").notes
    with pytest.raises(InputError, match="--restart"):
        exported(folder, output, "F32")
    exported(folder, output, "F32", restart=True)
    assert load_file(output / "model.safetensors")["lm_head.weight"].dtype is torch.float32
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").write_text("mine")
    with pytest.raises(InputError, match="not written by lmpress"):
        exported(folder, tmp_path / "letters", restart=True)


def test_refusals(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not quantized"):
        exported(tiny_llama, tmp_path / "out")
    folder = write_packed(tiny_llama, tmp_path / "packed", scheme_named("W4A16", 32))
    with pytest.raises(InputError, match="'Q4_0' is not known"):
        exported(folder, tmp_path / "out", "Q4_0")
    with pytest.raises(InputError, match="overlaps the model folder"):
        exported(folder, folder / "out")
