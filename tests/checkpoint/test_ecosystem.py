"""The whole of a checkpoint in other hands: transformers, with compressed-tensors, decompresses our weights exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from compress.checkpoint import Section, Writer, open_checkpoint
from compress.checkpoint.quantization_config import build, parse
from compress.formats import format_named
from compress.formats.grid import Grid, Quantized, dequantize
from compress.formats.scheme import Scheme, scheme_named

CASES = {
    "W4A16": (scheme_named("W4A16", 32),),
    "W4A16 by channel": (scheme_named("W4A16", "channel"),),
    "W4A16_ASYM": (scheme_named("W4A16_ASYM", 64),),
    "W8A16": (scheme_named("W8A16", 32),),
    "W8A8": (scheme_named("W8A8"),),
    "mixed": (scheme_named("W4A16", 32), scheme_named("W8A8")),
}
# Without dequantize, transformers 5.24 with compressed-tensors 0.20 refuses the packed zero points of any asymmetric
# checkpoint, their own included; with it, it reads every group of a mixed one as the first.
LOADING = {"W4A16_ASYM": {"quantization_config": CompressedTensorsConfig(dequantize=True)}}


def quantized(weight: Tensor, grid: Grid) -> Quantized:
    """Rounded to nearest; which integers does not matter here."""
    groups = weight.float().view(weight.shape[0], grid.groups(weight.shape[1]), -1)
    scale = (groups.abs().amax(-1) / grid.maximum).to(weight.dtype)
    zero = None if grid.symmetric else torch.full_like(scale, 3, dtype=torch.int8)
    shifted = (groups / scale.float().unsqueeze(-1)).round() + (0 if zero is None else zero.unsqueeze(-1))
    return Quantized(shifted.clamp(grid.minimum, grid.maximum).to(torch.int8).view(weight.shape), scale, zero)


@pytest.mark.parametrize("case", CASES)
def test_transformers_decompresses_what_was_meant(case: str, tiny_llama: Path, tmp_path: Path) -> None:
    source = open_checkpoint(tiny_llama)
    linears = [name.removesuffix(".weight") for name in source.tensors if name.endswith("_proj.weight")]
    schemes: dict[str, Scheme] = {name: CASES[case][i % len(CASES[case])] for i, name in enumerate(linears)}
    meant = {name: quantized(source.read(f"{name}.weight"), scheme.grid) for name, scheme in schemes.items()}
    tensors = {name: source.read(name) for name in source.tensors if name.removesuffix(".weight") not in schemes}
    for name, scheme in schemes.items():
        packed = format_named(scheme.format).pack(meant[name], scheme.grid)
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in packed.items()}

    writer = Writer(tmp_path / "out", [Section("all", {name: t.nbytes for name, t in tensors.items()})], "recipe")
    writer.write("all", tensors, {})
    config = source.config | {"quantization_config": build(schemes, ["lm_head"], torch.bfloat16)}
    output = writer.finish({"config.json": json.dumps(config)})

    assert parse(open_checkpoint(output).config, [*linears, "lm_head"]) == schemes
    model = AutoModelForCausalLM.from_pretrained(output, **LOADING.get(case, {}))
    model(torch.arange(8).unsqueeze(0))  # compressed-tensors decompresses a weight when it is first used
    for name in linears:
        # Both sides round (q - zero) * scale to bfloat16 once.
        assert torch.equal(model.get_submodule(name).weight, dequantize(meant[name]).bfloat16()), name
    assert torch.equal(model.lm_head.weight, source.read("lm_head.weight"))
