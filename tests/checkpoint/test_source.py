"""Sources: rows of dequantized weights, the dominant dtype, and the schemes a checkpoint is stored under."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compress.checkpoint import open_checkpoint
from compress.checkpoint.quantization_config import stored_schemes
from compress.checkpoint.source import dequantized, dominant_dtype
from compress.errors import InputError
from compress.formats.scheme import scheme_named
from tests.runtime.packing import write_packed

UP = "model.layers.0.mlp.up_proj"


def test_rows_are_those_of_the_whole(tiny_llama: Path, tmp_path: Path) -> None:
    scheme = scheme_named("W4A16", 32)
    checkpoint = open_checkpoint(write_packed(tiny_llama, tmp_path / "packed", scheme))
    schemes = stored_schemes(checkpoint)
    assert len(schemes) == 14 and set(schemes.values()) == {scheme}
    source = dequantized(checkpoint, schemes, torch.bfloat16)
    for name in (f"{UP}.weight", "lm_head.weight"):
        assert torch.equal(source.read_rows(name, 5, 9), source.read(name)[5:9])


def test_the_dominant_dtype_is_that_of_most_floating_point_bytes(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(9, dtype=torch.bfloat16), "b": torch.zeros(4), "c": torch.zeros(99, dtype=torch.int8)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert dominant_dtype(open_checkpoint(tmp_path).tensors) == torch.bfloat16
    save_file({"c": tensors["c"]}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"model\.safetensors: holds no floating-point tensor"):
        dominant_dtype(open_checkpoint(tmp_path).tensors)
