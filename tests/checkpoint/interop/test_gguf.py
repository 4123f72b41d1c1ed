"""Whole models as GGUF: other readers get the same weights, the same logits and the same tokens back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from compress.checkpoint import open_checkpoint
from compress.checkpoint.interop import gguf
from compress.checkpoint.interop.exported import Exported
from compress.checkpoint.quantization_config import stored_schemes
from compress.checkpoint.source import dequantized
from compress.errors import InputError
from compress.formats.grid import Grid
from compress.formats.scheme import scheme_named
from compress.runtime.config import ModelConfig
from compress.runtime.load import known_config
from tests.runtime.families import CASES, LLAMA3, Case, write_case
from tests.runtime.packing import nearest, write_packed

# Not the cases with biases or a scaled rope: transformers reads neither out of the GGUF file of a Llama. Of Qwen3 it
# reads no head_dim either, so that 128, its default, has to do.
READABLE = {name: CASES[name] for name in ("llama", "mistral without window", "qwen2")}
READABLE["llama, tied"] = Case("llama", {"tie_word_embeddings": True, "rope_theta": 500.0})
READABLE["qwen3"] = Case("qwen3", {"head_dim": 128})


def exported(folder: Path, output: Path, kind: str = "auto", embeddings: str = "auto") -> Exported:
    """What `lmpress export --format gguf` does."""
    checkpoint = open_checkpoint(folder)
    shape = known_config(checkpoint)
    assert isinstance(shape, ModelConfig)
    return gguf.export(checkpoint, stored_schemes(checkpoint), shape, output, gguf.Options(kind, embeddings))


def read_back(file: Path) -> dict[str, Tensor]:
    """The tensors of a GGUF file as the gguf package dequantizes them, rows first."""
    found = {}
    for tensor in reference.GGUFReader(file).tensors:
        values = reference.quants.dequantize(tensor.data, tensor.tensor_type)
        found[tensor.name] = torch.from_numpy(np.array(values)).view(*reversed(tensor.shape.tolist()))
    return found


def fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in reference.GGUFReader(file).fields.items()}


def unpaired(weight: Tensor, heads: int) -> Tensor:
    """Rows of q or k from llama.cpp's order back to transformers'."""
    return weight.view(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("name", READABLE)
def test_transformers_computes_the_same_from_it(name: str, tmp_path: Path) -> None:
    folder = write_case(tmp_path / "model", READABLE[name])
    done = exported(folder, tmp_path / "out.gguf", "F32")
    loading = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="out.gguf", **loading)
    source = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.allclose(model(tokens).logits, source(tokens).logits, atol=1e-4)
    assert done.nbytes == done.output.stat().st_size


def test_every_tensor_of_a_llama_with_all_extras(tmp_path: Path) -> None:
    folder = write_case(tmp_path / "model", CASES["llama, llama3 rope, biases, tied"])
    done = exported(folder, tmp_path / "out")
    assert done.output == tmp_path / "out" / "model.gguf"
    found, source = read_back(done.output), load_file(folder / "model.safetensors")
    factors = found.pop("rope_freqs.weight")
    for prefix, heads in (("q", 4), ("k", 2)):
        for suffix in ("weight", "bias"):
            name = f"blk.1.attn_{prefix}.{suffix}"
            assert torch.equal(
                unpaired(found.pop(name), heads), source.pop(f"model.layers.1.self_attn.{prefix}_proj.{suffix}")
            )
    assert torch.equal(found["blk.1.ffn_down.bias"], source["model.layers.1.mlp.down_proj.bias"])
    assert torch.equal(found["blk.0.attn_output.weight"], source["model.layers.0.self_attn.o_proj.weight"])
    assert torch.equal(found["token_embd.weight"], source["model.embed_tokens.weight"])
    assert len(found) == len(source) and "output.weight" not in found
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = LLAMA3["rope_theta"] ** -(torch.arange(0, 16, 2) / 16)
    assert torch.allclose(plain / factors, model.model.rotary_emb.inv_freq, rtol=1e-6)


def test_linear_rope_and_windows_are_said(tmp_path: Path) -> None:
    told = fields(exported(write_case(tmp_path / "a", CASES["llama, linear rope"]), tmp_path / "a.gguf").output)
    assert (told["llama.rope.scaling.type"], told["llama.rope.scaling.factor"]) == ("linear", 4.0)
    done = exported(write_case(tmp_path / "b", CASES["mistral"]), tmp_path / "b.gguf")
    assert fields(done.output)["llama.context_length"] == 7
    assert any("no sliding window" in note for note in done.notes)


SCHEMES = {
    "Q4_0": ("W4A16", 32),
    "Q4_0 in larger groups": ("W4A16", 64),
    "Q4_0 by row": ("W4A16", "channel"),
    "Q8_0": ("W8A16", 32),
    "Q8_0 by row": ("W8A8", None),
}


@pytest.mark.parametrize("case", SCHEMES)
def test_integers_are_carried_over(case: str, tiny_llama: Path, tmp_path: Path) -> None:
    kind = case.partition(" ")[0]
    folder = write_packed(tiny_llama, tmp_path / "packed", scheme_named(*SCHEMES[case]))
    done = exported(folder, tmp_path / "out.gguf")
    assert done.record.types == {kind: 14, "Q8_0": 2, "F32": 5} if kind == "Q4_0" else {kind: 16, "F32": 5}
    assert done.record.carried == 14 and done.record.scales and not done.record.scales_rounded
    assert sorted(sum(done.record.rounded.values(), [])) == ["lm_head.weight", "model.embed_tokens.weight"]
    found, checkpoint = read_back(done.output), open_checkpoint(folder)
    floats = dequantized(checkpoint, stored_schemes(checkpoint), torch.float32)
    assert torch.equal(unpaired(found["blk.0.attn_q.weight"], 4), floats.read("model.layers.0.self_attn.q_proj.weight"))
    assert torch.equal(unpaired(found["blk.1.attn_k.weight"], 2), floats.read("model.layers.1.self_attn.k_proj.weight"))
    for source, target in (("self_attn.v_proj", "attn_v"), ("mlp.down_proj", "ffn_down"), ("mlp.up_proj", "ffn_up")):
        assert torch.equal(found[f"blk.1.{target}.weight"], floats.read(f"model.layers.1.{source}.weight"))


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16", "BF16"])
def test_float_weights_are_rounded_as_the_reference_does(kind: str, tiny_llama: Path, tmp_path: Path) -> None:
    done = exported(tiny_llama, tmp_path / "out.gguf", kind, kind)
    stored = {tensor.name: tensor for tensor in reference.GGUFReader(done.output).tensors}
    source = load_file(tiny_llama / "model.safetensors")
    pairs = {"token_embd": "model.embed_tokens", "output": "lm_head", "blk.1.ffn_gate": "model.layers.1.mlp.gate_proj"}
    for target, name in pairs.items():
        tensor = stored[f"{target}.weight"]
        assert tensor.tensor_type.name == kind
        expected = reference.quants.quantize(source[f"{name}.weight"].float().numpy(), tensor.tensor_type)
        assert np.array_equal(tensor.data.view(np.uint8), expected.view(np.uint8))
    assert (done.record.rounded == {}) == (kind == "BF16")


def test_rounding_and_carrying_meet(tiny_llama: Path, tmp_path: Path) -> None:
    """`--type Q4_0` carries what is on that grid; `--type Q8_0` rounds the same weights anew."""
    folder = write_packed(tiny_llama, tmp_path / "packed", scheme_named("W4A16", 32))
    same = [exported(folder, tmp_path / f"{kind}.gguf", kind).output.read_bytes() for kind in ("auto", "Q4_0")]
    assert same[0] == same[1]
    done = exported(folder, tmp_path / "Q8_0.gguf", "Q8_0")
    assert done.record.carried == 0 and "W4A16 in groups of 32 to Q8_0" in done.record.rounded


@pytest.mark.parametrize("scheme", [scheme_named("W4A16_ASYM", 32), scheme_named("LLM_INT8")], ids=lambda one: one.name)
def test_what_gguf_cannot_hold_is_refused_until_rounding_is_asked_for(
    scheme: Any, tiny_llama: Path, tmp_path: Path
) -> None:
    folder = write_packed(tiny_llama, tmp_path / "packed", scheme, outliers=2)
    with pytest.raises(InputError, match="give --type Q8_0"):
        exported(folder, tmp_path / "out.gguf")
    done = exported(folder, tmp_path / "out.gguf", "Q8_0")
    assert len(done.record.rounded[f"{scheme.name} in groups of {scheme.grid.group_size or 'a row'} to Q8_0"]) == 14
    checkpoint = open_checkpoint(folder)
    meant = dequantized(checkpoint, stored_schemes(checkpoint), torch.float32).read("model.layers.0.mlp.up_proj.weight")
    assert torch.allclose(read_back(done.output)["blk.0.ffn_up.weight"], meant, atol=float(meant.abs().max()) / 127)


def test_scales_that_float16_cannot_say_are_counted(tiny_llama: Path, tmp_path: Path) -> None:
    folder = write_packed(tiny_llama, tmp_path / "packed", scheme_named("W4A16", 32))
    tensors = load_file(folder / "model.safetensors")
    scale = tensors["model.layers.0.mlp.up_proj.weight_scale"]
    scale[0, 0], scale[1, 0] = 2.0**-20 * 1.5, 2.0**-24 * 1.25
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    done = exported(folder, tmp_path / "out.gguf")
    assert (done.record.scales_rounded, done.record.scale_error) == (1, pytest.approx(0.2))
    assert any(line.startswith("rounded: 1 of ") for line in done.lines())
    scale[2, 0] = 1e6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="up_proj.*float16"):
        exported(folder, tmp_path / "again.gguf")
    assert not (tmp_path / "again.gguf").exists()


def test_tokens_and_template_come_along(tiny_llama: Path, tmp_path: Path) -> None:
    done = exported(tiny_llama, tmp_path / "out.gguf")
    told, tokenizer = fields(done.output), AutoTokenizer.from_pretrained(tiny_llama)
    assert len(told["tokenizer.ggml.tokens"]) == 288 and told["tokenizer.ggml.tokens"][287] == "[PAD287]"
    assert told["tokenizer.ggml.token_type"][254:260] == [1, 1, 3, 3, 3, 5]
    assert told["tokenizer.chat_template"] == tokenizer.chat_template
    assert [told[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding")] == [256, 257, 258]
    assert (told["general.architecture"], told["general.file_type"]) == ("llama", 32)


def test_a_model_that_llama_cpp_would_run_otherwise_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    changes = {
        "gelu": ({"hidden_act": "gelu"}, "activation"),
        "gemma": ({"model_type": "gemma"}, "model_type 'gemma'"),
        "vocabulary": ({"vocab_size": 300}, "has shape"),
        "layers": ({"num_hidden_layers": 1}, "belongs to no layer"),
        "more layers": ({"num_hidden_layers": 3}, "is missing"),
    }
    for name, (change, told) in changes.items():
        folder = tmp_path / name
        shutil.copytree(tiny_llama, folder)
        config = json.loads((folder / "config.json").read_text()) | change
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match=told):
            exported(folder, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_columns_that_do_not_fill_blocks_are_refused(tmp_path: Path) -> None:
    folder = write_case(tmp_path / "model", Case("llama", {"hidden_size": 48, "intermediate_size": 80}))
    with pytest.raises(InputError, match="48 columns.*--type F16"):
        exported(folder, tmp_path / "out.gguf", "Q8_0")
    exported(folder, tmp_path / "out.gguf", "F16", "F16")


def test_unknown_types_are_usage_errors(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'Q4_K' is not known.*Q4_0") as caught:
        exported(tiny_llama, tmp_path / "out.gguf", "Q4_K")
    assert caught.value.exit_code == 2


def test_a_quantized_head_is_carried_over_too(tiny_llama: Path, tmp_path: Path) -> None:
    folder = write_packed(tiny_llama, tmp_path / "packed", scheme_named("W8A8"))
    tensors, grid = load_file(folder / "model.safetensors"), Grid(8)
    head = nearest(tensors.pop("lm_head.weight"), grid)
    tensors |= {"lm_head.weight": head.q, "lm_head.weight_scale": head.scale}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    (folder / "config.json").write_text(json.dumps(config))
    done = exported(folder, tmp_path / "out.gguf")
    assert done.record.carried == 15
    assert torch.equal(read_back(done.output)["output.weight"], head.q.float() * head.scale.float())
