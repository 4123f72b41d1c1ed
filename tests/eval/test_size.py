"""Bits per weight against arithmetic from the formats, whole-model sizes, and the key-value cache."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compress.checkpoint import open_checkpoint
from compress.checkpoint.quantization_config import stored_schemes
from compress.eval.size import ModuleSize, Size, bytes_read_per_token, kv_bytes_per_token, measure_size
from compress.formats.scheme import scheme_named
from tests.eval.compressed import compress_folder

# Projections of tiny_llama as (rows, columns), two blocks of each.
SHAPES = [(64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (128, 64), (64, 128)]
WEIGHTS = 2 * sum(rows * columns for rows, columns in SHAPES)
REST = 2 * 288 * 64 + 5 * 64  # embedding, head and norms


def test_w4a16_bits_are_those_of_integers_scales_and_shapes(packed: Path) -> None:
    checkpoint = open_checkpoint(packed)
    size = measure_size(checkpoint, stored_schemes(checkpoint))
    assert len(size.compressed) == 14
    assert sum(module.weights for module in size.modules) == WEIGHTS + REST
    stored = WEIGHTS // 2 + WEIGHTS // 32 * 2 + 14 * 16
    assert size.bits_per_weight == pytest.approx(8 * stored / WEIGHTS, rel=1e-12)
    assert size.bits_per_weight_all == pytest.approx(8 * (stored + 2 * REST) / (WEIGHTS + REST), rel=1e-12)
    assert size.file_bytes == (packed / "model.safetensors").stat().st_size


@pytest.mark.parametrize("outliers", [0, 3])
def test_outlier_columns_add_bytes_and_no_weights(tiny_llama: Path, tmp_path: Path, outliers: int) -> None:
    checkpoint = open_checkpoint(compress_folder(tiny_llama, tmp_path / "int8", "LLM_INT8", outliers=outliers))
    size = measure_size(checkpoint, stored_schemes(checkpoint))
    rows = 2 * sum(rows for rows, _ in SHAPES)
    stored = WEIGHTS + 2 * rows + outliers * (2 * rows + 4 * 14)
    assert sum(module.weights for module in size.compressed) == WEIGHTS
    assert size.bits_per_weight == pytest.approx(8 * stored / WEIGHTS, rel=1e-12)


def test_an_uncompressed_model_has_the_bits_of_its_dtype(tiny_llama: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama)
    size = measure_size(checkpoint, stored_schemes(checkpoint))
    assert size.compressed == ()
    assert size.bits_per_weight == size.bits_per_weight_all == 16.0


def test_kv_cache_is_in_the_checkpoints_own_dtype(tiny_llama: Path, packed: Path) -> None:
    dimensions = SimpleNamespace(layer_count=2, kv_heads=2, head_dim=16)
    for folder in (tiny_llama, packed):
        assert kv_bytes_per_token(open_checkpoint(folder), dimensions) == 2 * 2 * 2 * 16 * 2


@pytest.mark.parametrize("output", ["lm_head.weight", "embed_out.weight"])
def test_the_input_embedding_is_idle_where_there_is_an_output_layer(output: str) -> None:
    modules = [
        ModuleSize("model.embed.weight", None, 600, 1200),
        ModuleSize("model.layers.0.q_proj.weight", None, 900, 1800),
        ModuleSize("model.norm.weight", None, 6, 12),
    ]
    assert bytes_read_per_token(Size(0, tuple(modules)), 4) == 4 * (600 + 900 + 6)
    modules.append(ModuleSize(output, None, 600, 1200))
    assert bytes_read_per_token(Size(0, tuple(modules)), 4) == 4 * (600 + 900 + 6)
    modules[-1] = ModuleSize(output.removesuffix(".weight"), scheme_named("W8A16", 4), 600, 700)
    assert bytes_read_per_token(Size(0, tuple(modules)), 4) == 700 + 4 * (900 + 6)


def test_a_token_reads_packed_weights_as_stored_and_no_more_than_a_row_of_the_embedding(packed: Path) -> None:
    checkpoint = open_checkpoint(packed)
    size = measure_size(checkpoint, stored_schemes(checkpoint))
    stored = sum(module.nbytes for module in size.compressed)
    assert bytes_read_per_token(size, torch.float32.itemsize) == stored + 4 * (REST - 288 * 64)
