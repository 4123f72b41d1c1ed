"""Networks in training form against transformers' own forward pass: hidden states, logits, gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress.checkpoint import open_checkpoint
from compress.checkpoint.quantization_config import stored_schemes
from compress.checkpoint.source import dequantized
from compress.errors import InputError
from compress.training.network import Network, load_network
from compress.training.student import load_student
from compress.training_settings import Training
from tests.tiny import write_model
from tests.training.compressed import SCHEMES, write_compressed

CPU = torch.device("cpu")
IDS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
CAPPED = {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 16}
FAMILIES = {
    "llama": {},
    "qwen2 tied": {"tie_word_embeddings": True},
    "gemma2 capped": CAPPED,
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = request.param.partition(" ")[0]
    return write_model(tmp_path_factory.mktemp("network") / family, family, **FAMILIES[request.param])


def logits_of(network: Network) -> Tensor:
    hidden, _ = network.hidden(IDS)
    return network.logits(hidden.flatten(0, 1)).view(*IDS.shape, -1)


def test_logits_equal_transformers(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    network = load_network(folder, CPU)
    with torch.no_grad():
        expected = model(IDS).logits
        found = logits_of(network)
    assert torch.allclose(found, expected, atol=1e-5)
    assert (network.vocabulary, network.layers, network.width) == (expected.shape[-1], 2, 64)
    assert not any(parameter.requires_grad for parameter in network.parameters()) and not network.training


def test_hidden_states_are_those_in_front_of_the_final_norm(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    network = load_network(folder, CPU)
    with torch.no_grad():
        told = model(IDS, output_hidden_states=True).hidden_states
        last, states = network.hidden(IDS, every=True)
        alone, none = network.hidden(IDS)
    assert len(states) == network.layers + 1 and none == ()
    for mine, theirs in zip(states[:-1], told[:-1], strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    # transformers tells the last one behind the norm.
    norm = model.transformer.ln_f if hasattr(model, "transformer") else model.model.norm
    with torch.no_grad():
        assert torch.allclose(norm(states[-1]), told[-1], atol=1e-5)
    assert torch.equal(last, alone) and torch.allclose(last, told[-1], atol=1e-5)


def test_gradients_equal_those_of_transformers_with_and_without_recomputation(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model(IDS).logits.logsumexp(-1).mean().backward()
    wanted = {name: one.grad for name, one in model.named_parameters()}
    for checkpointing in (False, True):
        student = load_student(folder, Training(train=("*.*",), gradient_checkpointing=checkpointing), CPU)
        logits_of(student.network).logsumexp(-1).mean().backward()
        found = {name: one.grad for name, one in student.network.model.named_parameters()}
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert torch.allclose(found[name], gradient, atol=1e-6), name


def test_recomputation_keeps_less(tiny_llama: Path) -> None:
    kept = {}
    for checkpointing in (False, True):
        network = load_student(tiny_llama, Training(gradient_checkpointing=checkpointing), CPU).network
        own = {one.untyped_storage().data_ptr() for one in network.parameters()}
        seen: dict[int, int] = {}

        def keep(tensor: Tensor, own: set[int] = own, seen: dict[int, int] = seen) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden, states = network.hidden(IDS, every=True)
        kept[checkpointing] = sum(seen.values())
        (hidden.sum() + states[1].square().sum()).backward()
    assert kept[True] < kept[False] / 3


def test_head_parameters_are_all_that_logits_uses(folder: Path) -> None:
    network = load_network(folder, CPU).requires_grad_(True)
    hidden = torch.randn(3, network.width)
    network.logits(hidden).sum().backward()
    used = {id(one) for one in network.parameters() if one.grad is not None}
    assert used == {id(one) for one in network.head_parameters()}


def test_a_compressed_teacher_is_the_floats_it_stands_for(tiny_llama: Path, tmp_path: Path) -> None:
    packed = write_compressed(tiny_llama, tmp_path / "packed", SCHEMES["W8A8 2:4"])
    checkpoint = open_checkpoint(packed)
    floats = dequantized(checkpoint, stored_schemes(checkpoint), torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    model.load_state_dict({name: floats.read(name).float() for name in floats.tensors})
    with torch.no_grad():
        assert torch.allclose(logits_of(load_network(packed, CPU)), model(IDS).logits, atol=1e-5)
    half = load_network(packed, CPU, torch.bfloat16)
    assert {one.dtype for one in half.parameters()} == {torch.bfloat16}


def test_a_folder_of_another_model_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    packed = write_compressed(tiny_llama, tmp_path / "packed", SCHEMES["W4A16"])
    config = (packed / "config.json").read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    (packed / "config.json").write_text(config)
    with pytest.raises(InputError, match=r"'model\.layers\.2\..*' is missing"):
        load_network(packed, CPU)
