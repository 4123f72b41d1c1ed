"""Architectures that the decoder does not know: transformers' own answers, packed or not, and a note that says so."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from compress.errors import InputError
from compress.formats.scheme import scheme_named
from compress.runtime.load import Execution, load_model
from tests.runtime.packing import write_packed
from tests.tiny import write_model

TOKENS = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("gpt2", {}, "model_type 'gpt2'"),
        ("granite", {"logits_scaling": 3.0}, "model_type 'granite'"),  # its head divides the logits
        ("mixtral", {"num_local_experts": 4}, "model_type 'mixtral'"),  # its tensors are regrouped on loading
        ("llama", {"rope_parameters": YARN}, "rope_type is 'yarn'"),
    ],
    ids=["gpt2", "granite", "mixtral", "yarn"],
)
def test_unknown_architectures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model_type: str, changes: dict[str, Any], reason: str
) -> None:
    folder = write_model(tmp_path / "model", model_type, torch.float32, **changes)
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits
    with caplog.at_level(logging.WARNING, "compress"):
        model = load_model(folder)
    assert model.engine == "transformers" and reason in model.notes[0] and reason in caplog.text
    assert (model.config.vocab_size, model.config.layer_count, model.config.head_dim) == (288, 2, 16)
    assert torch.allclose(model.logits(model.hidden(TOKENS)), want, atol=1e-5)
    cache = model.new_cache(2, 33)
    chunks = [TOKENS[:, :20], *TOKENS[:, 20:].split(1, dim=1)]
    stepwise = torch.cat([model.hidden(chunk, cache) for chunk in chunks], dim=1)
    assert torch.allclose(model.logits(stepwise), want, atol=1e-5)
    with pytest.raises(InputError, match="token id 288"):
        model.hidden(torch.tensor([[288]]))


def test_a_narrow_cache_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "gpt2", torch.float32)
    with pytest.raises(InputError, match="kv_cache: 'int8' needs the native decoder"):
        load_model(folder, execution=Execution(kv_cache="int8"))


def test_missing_native_kernels_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "model", "gpt2", torch.float32)
    monkeypatch.setenv("LMPRESS_CPU_VARIANT", "none")
    with caplog.at_level(logging.WARNING, "compress"):
        model = load_model(folder)
    assert [told["name"] for told in model.fallbacks] == ["native kernels"] and "native kernels" in caplog.text


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_packed_layers_are_swapped_in(tmp_path: Path, scheme: str) -> None:
    plain = write_model(tmp_path / "plain", rope_parameters=YARN, tie_word_embeddings=True)
    folder = write_packed(plain, tmp_path / "packed", scheme_named(scheme, 32 if scheme == "W4A16" else None))
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits
    for kernels, bound in (("reference", 1e-3), ("auto", 0.1)):  # int8 activations, and other ties
        model = load_model(folder, execution=Execution(kernels))
        assert model.engine == "transformers" and len(model.kernels) == 14
        assert set(model.kernels.values()) == {"reference"} or kernels == "auto"
        got = model.logits(model.hidden(TOKENS))
        assert ((got - want).norm() / want.norm()).item() < bound


def test_packed_tensors_under_other_names(tmp_path: Path) -> None:
    """transformers would rename these as it loads them; a swap by name cannot, and says so."""
    plain = write_model(tmp_path / "plain", "mixtral", num_local_experts=4)
    folder = write_packed(plain, tmp_path / "packed", scheme_named("W4A16", 32))
    with pytest.raises(InputError, match="is missing.*or export it as 'dense'"):
        load_model(folder)


def test_architectures_that_nobody_knows(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
    with pytest.raises(InputError, match="neither the bundled decoder nor transformers can load it"):
        load_model(folder)


def test_missing_tensors(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "olmo2")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="'model.norm.weight' is missing"):
        load_model(folder)


def test_values_that_cannot_be(tmp_path: Path) -> None:
    """Bad values are told in one line, whether or not the weights are packed."""
    plain = write_model(tmp_path / "plain", "olmo2")
    packed = write_packed(plain, tmp_path / "packed", scheme_named("W4A16", 32))
    for folder in (plain, packed):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": "two"}))
        with pytest.raises(InputError, match="transformers can load it: .*num_hidden_layers") as caught:
            load_model(folder)
        assert "\n" not in str(caught.value)
