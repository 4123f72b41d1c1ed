"""GPTQ and AWQ: the integers unpacked as those formats' own loaders do, and by compressed-tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.checkpoint import open_checkpoint
from compress.checkpoint.interop import awq, gptq
from compress.checkpoint.quantization_config import stored_schemes
from compress.checkpoint.source import dequantized
from compress.errors import InputError
from compress.formats.scheme import Scheme, scheme_named
from tests.runtime.packing import write_packed
from tests.tiny import write_model

MODULE = "model.layers.1.mlp.down_proj"


def meant(folder: Path) -> Tensor:
    checkpoint = open_checkpoint(folder)
    return dequantized(checkpoint, stored_schemes(checkpoint), torch.float32).read(f"{MODULE}.weight")


def fields(words: Tensor, bits: int, along: int) -> Tensor:
    """int32 words into unsigned integers, lowest bits first, along dimension `along`."""
    shifts = torch.arange(0, 32, bits)
    unpacked = words.unsqueeze(along + 1) >> shifts.view(-1, *[1] * (1 - along)) & (1 << bits) - 1
    return unpacked.flatten(along, along + 1)


def gptq_weight(tensors: dict[str, Tensor], bits: int) -> Tensor:
    """As AutoGPTQ dequantizes: stored zero points are one too small, g_idx says each column's group."""
    q = fields(tensors[f"{MODULE}.qweight"], bits, 0)
    group = tensors[f"{MODULE}.g_idx"].long()
    zero = fields(tensors[f"{MODULE}.qzeros"], bits, 1)[group] + 1
    return ((q - zero) * tensors[f"{MODULE}.scales"].float()[group]).T


def awq_weight(tensors: dict[str, Tensor]) -> Tensor:
    """As AutoAWQ dequantizes: columns of a word lie in the order 0 2 4 6 1 3 5 7."""

    def columns(words: Tensor) -> Tensor:
        nibbles = fields(words, 4, 1).view(words.shape[0], -1, 8)
        return nibbles[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1)

    q, zero = columns(tensors[f"{MODULE}.qweight"]), columns(tensors[f"{MODULE}.qzeros"])
    share = q.shape[0] // zero.shape[0]
    scale = tensors[f"{MODULE}.scales"].float()
    return ((q - zero.repeat_interleave(share, 0)) * scale.repeat_interleave(share, 0)).T


@pytest.mark.parametrize(
    "scheme",
    [
        scheme_named("W4A16", 32),
        scheme_named("W4A16", "channel"),
        scheme_named("W4A16_ASYM", 64),
        scheme_named("W8A16", 64),
    ],
    ids=["W4A16", "by row", "W4A16_ASYM", "W8A16"],
)
def test_gptq_unpacks_to_the_same_weights(scheme: Scheme, tiny_llama: Path, tmp_path: Path) -> None:
    folder = without_lowest_zero(write_packed(tiny_llama, tmp_path / "packed", scheme))
    checkpoint = open_checkpoint(folder)
    done = gptq.export(checkpoint, stored_schemes(checkpoint), tmp_path / "out")
    tensors = load_file(done.output / "model.safetensors")
    assert torch.equal(gptq_weight(tensors, scheme.grid.bits), meant(folder))
    assert torch.equal(tensors["lm_head.weight"], load_file(folder / "model.safetensors")["lm_head.weight"])
    told = json.loads((done.output / "config.json").read_text())["quantization_config"]
    assert told == json.loads((done.output / "quantize_config.json").read_text())
    assert (told["bits"], told["sym"], told["desc_act"]) == (scheme.grid.bits, scheme.grid.symmetric, False)
    assert told["group_size"] == (scheme.grid.group_size or -1) and "dynamic" not in told
    assert done.record.carried == 14 and not done.record.scales_rounded
    if scheme.grid.symmetric and scheme.grid.bits == 4:
        assert set(tensors[f"{MODULE}.qzeros"].flatten().tolist()) == {0x77777777}


@pytest.mark.parametrize(
    "scheme", [scheme_named("W4A16", 32), scheme_named("W4A16_ASYM", 64)], ids=lambda one: one.name
)
def test_awq_unpacks_to_the_same_weights(scheme: Scheme, tiny_llama: Path, tmp_path: Path) -> None:
    folder = write_packed(tiny_llama, tmp_path / "packed", scheme)
    checkpoint = open_checkpoint(folder)
    done = awq.export(checkpoint, stored_schemes(checkpoint), tmp_path / "out")
    tensors = load_file(done.output / "model.safetensors")
    assert torch.equal(awq_weight(tensors), meant(folder))
    told = json.loads((done.output / "config.json").read_text())["quantization_config"]
    assert told["modules_to_not_convert"] == ["lm_head"] and told["zero_point"] is True
    # compressed-tensors' own converter brings them back to what they were exported from.
    back = AutoAWQConverter(group_size=told["group_size"]).process(dict(tensors))
    packed = load_file(folder / "model.safetensors")
    assert torch.equal(back[f"{MODULE}.weight_packed"], packed[f"{MODULE}.weight_packed"])
    assert torch.equal(back[f"{MODULE}.weight_scale"].float(), packed[f"{MODULE}.weight_scale"].float())
    if not scheme.grid.symmetric:
        assert torch.equal(back[f"{MODULE}.weight_zero_point"], packed[f"{MODULE}.weight_zero_point"])


def test_layers_left_alone_are_named(tiny_llama: Path, tmp_path: Path) -> None:
    folder = unpacked(write_packed(tiny_llama, tmp_path / "packed", scheme_named("W4A16", 32)), tiny_llama)
    checkpoint = open_checkpoint(folder)
    schemes = stored_schemes(checkpoint)
    for module, format_ in ((gptq, "dynamic"), (awq, "modules_to_not_convert")):
        done = module.export(checkpoint, schemes, tmp_path / module.NAME)
        told = json.loads((done.output / "config.json").read_text())["quantization_config"][format_]
        expected = {f"-:^{MODULE.replace('.', chr(92) + '.')}$": {}} if module is gptq else ["lm_head", MODULE]
        assert told == expected


def test_refusals(tiny_llama: Path, tmp_path: Path) -> None:
    def refused(scheme: Scheme, module: object, told: str, model: Path = tiny_llama) -> None:
        folder = write_packed(model, tmp_path / f"{len(list(tmp_path.iterdir()))}", scheme)
        checkpoint = open_checkpoint(folder)
        with pytest.raises(InputError, match=told):
            module.export(checkpoint, stored_schemes(checkpoint), tmp_path / "out")  # type: ignore[attr-defined]

    refused(scheme_named("W8A8"), gptq, "W8A8, and gptq holds")
    refused(scheme_named("W8A16", 32), awq, "W8A16, and awq holds")
    refused(scheme_named("W4A16", "channel"), awq, "AWQ wants groups")
    narrow = write_model(tmp_path / "narrow", intermediate_size=80)
    refused(scheme_named("W4A16", 16), gptq, "multiples of 32", narrow)
    with pytest.raises(InputError, match="not quantized"):
        awq.export(open_checkpoint(tiny_llama), {}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_zero_point_of_zero_does_not_borrow(tiny_llama: Path, tmp_path: Path) -> None:
    folder = write_packed(tiny_llama, tmp_path / "packed", scheme_named("W4A16_ASYM", 64))
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{MODULE}.weight_zero_point"][0, 0] = 0x11011111
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(folder)
    with pytest.raises(InputError, match="zero point of 0.*'awq'"):
        gptq.export(checkpoint, stored_schemes(checkpoint), tmp_path / "out")


def test_several_schemes_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    folder = write_packed(tiny_llama, tmp_path / "packed", scheme_named("W4A16", 32))
    checkpoint = open_checkpoint(folder)
    schemes = stored_schemes(checkpoint) | {MODULE: scheme_named("W4A16", 64)}
    with pytest.raises(InputError, match="groups of 32 and W4A16 in groups of 64"):
        gptq.export(checkpoint, schemes, tmp_path / "out")


def without_lowest_zero(folder: Path) -> Path:
    """Zero points of 0 raised to 1, integers as they are: another weight, which GPTQ's layout can hold."""
    tensors = load_file(folder / "model.safetensors")
    for name, words in tensors.items():
        if name.endswith("weight_zero_point"):
            nibbles = words.long().unsqueeze(-1) >> torch.arange(0, 32, 4) & 15
            raised = (nibbles.clamp(min=1) << torch.arange(0, 32, 4)).sum(-1)
            tensors[name] = raised.to(torch.int32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def unpacked(folder: Path, source: Path) -> Path:
    """The checkpoint with MODULE as it was before it was packed."""
    tensors = {
        name: one for name, one in load_file(folder / "model.safetensors").items() if not name.startswith(MODULE)
    }
    tensors[f"{MODULE}.weight"] = load_file(source / "model.safetensors")[f"{MODULE}.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"].append(MODULE)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
