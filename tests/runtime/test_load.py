"""Loading: packed checkpoints against transformers with compressed-tensors, ties, dtypes, and bad folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from compress.checkpoint import open_checkpoint
from compress.errors import InputError
from compress.formats import format_named
from compress.formats.grid import dequantize
from compress.formats.scheme import scheme_named
from compress.runtime.load import Execution, Model, load_model
from tests.runtime.packing import write_packed
from tests.tiny import write_model

REFERENCE = Execution(kernels="reference")
TOKENS = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(0))
SCHEMES = {
    "W4A16": scheme_named("W4A16", 32),
    "W4A16_ASYM": scheme_named("W4A16_ASYM", 32),
    "W8A16": scheme_named("W8A16", 64),
    "W8A16 channel": scheme_named("W8A16", "channel"),
    "W8A8": scheme_named("W8A8"),
}


def logits_of(model: Model) -> Tensor:
    return model.logits(model.hidden(TOKENS))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("load") / "plain", "qwen2")


@pytest.fixture(scope="module")
def packed(plain: Path) -> Path:
    return write_packed(plain, plain.parent / "packed", scheme_named("W4A16", 32))


@pytest.mark.parametrize("name", SCHEMES)
def test_packed_logits_equal_transformers(plain: Path, tmp_path: Path, name: str) -> None:
    """W4A16_ASYM is dequantized as it loads: compressed-tensors 0.20 allots its packed zero points a wrong shape."""
    asymmetric = name == "W4A16_ASYM"
    scale_dtype = torch.float32 if asymmetric else torch.bfloat16  # there, weights take the dtype of the scales
    folder = write_packed(plain, tmp_path / "packed", SCHEMES[name], scale_dtype)
    extra = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if asymmetric else {}
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **extra)
    with torch.no_grad():
        want = other(TOKENS).logits
    model = load_model(folder, execution=REFERENCE)
    assert model.engine == "lmpress" and len(model.kernels) == 14 and set(model.kernels.values()) == {"reference"}
    assert ((logits_of(model) - want).abs().max() / want.abs().max()).item() < 1e-3

    checkpoint, scheme = open_checkpoint(folder), SCHEMES[name]
    stored_format, module = format_named(scheme.format), "model.layers.1.mlp.down_proj"
    suffixes = stored_format.specs((64, 128), scheme.grid, scale_dtype)
    stored = {suffix: checkpoint.read(f"{module}.{suffix}") for suffix in suffixes}
    ours = dequantize(stored_format.unpack(stored, scheme.grid))
    assert torch.equal(ours, other.get_submodule(module).weight.float())


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_outlier_columns_keep_what_int8_loses(plain: Path, tmp_path: Path, kernels: str) -> None:
    """An LLM_INT8 folder runs, and counts the activations that its columns missed."""
    reference = logits_of(load_model(plain))
    folder = write_packed(plain, tmp_path / "packed", scheme_named("LLM_INT8"), outliers=3)
    model = load_model(folder, execution=Execution(kernels))
    logits = logits_of(model)
    assert ((logits - reference).norm() / reference.norm()).item() < 0.05
    misses = model.outlier_misses()
    assert misses.keys() <= model.kernels.keys() and len(misses) == 14
    assert misses["model.layers.0.self_attn.q_proj"] == (0, TOKENS.numel() * 64)
    assert load_model(plain).outlier_misses() == {}
    assert load_model(plain, execution=REFERENCE).kernels == {}


def test_packed_weights_stay_packed(plain: Path, packed: Path) -> None:
    network = load_model(packed, execution=REFERENCE).network
    assert isinstance(network, torch.nn.Module)
    names = {name for name, _ in network.named_parameters()}
    assert not any("proj.weight" in name for name in names) and "model.layers.0.self_attn.q_proj.bias" in names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_dtype(plain: Path, packed: Path, dtype: torch.dtype) -> None:
    for folder in (plain, packed):
        model = load_model(folder, dtype=dtype)
        assert model.hidden(TOKENS).dtype == logits_of(model).dtype == dtype


def test_ties(tmp_path: Path) -> None:
    """Tied embeddings are one tensor. A head stored with other values is one of its own, as in transformers."""
    folder = write_model(tmp_path / "tied", tie_word_embeddings=True)
    network = load_model(folder, execution=REFERENCE).network
    assert network.lm_head.weight.data_ptr() == network.model.embed_tokens.weight.data_ptr()  # type: ignore[attr-defined]
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    network = load_model(folder, execution=REFERENCE).network
    assert network.lm_head.weight.data_ptr() == network.model.embed_tokens.weight.data_ptr()  # type: ignore[attr-defined]
    save_file(tensors | {"lm_head.weight": 2 * tensors["model.embed_tokens.weight"]}, folder / "model.safetensors")
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits
    for execution in (REFERENCE, Execution()):
        assert torch.allclose(logits_of(load_model(folder, execution=execution)), want, atol=1e-5)


def test_derived_tables_of_older_checkpoints_are_let_pass(plain: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(plain, tmp_path / "old")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, folder / "model.safetensors")
    assert load_model(folder).engine == "lmpress"


def test_ids_beyond_the_embedding(plain: Path) -> None:
    model = load_model(plain)
    for token in (288, -1):
        with pytest.raises(
            InputError, match=f"token id {token} is beyond the embedding, which has 288 rows: use the tok"
        ):
            model.hidden(torch.tensor([[5, token]]))


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
UP = "model.layers.0.mlp.up_proj"


def without(name: str) -> Change:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors | {name: change(tensors[name]).contiguous()}


def added(name: str) -> Change:
    return lambda tensors: tensors | {name: torch.zeros(4)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("model.norm.weight"), "tensor 'model.norm.weight' is missing"),
        (without(f"{UP}.weight_scale"), f"tensor '{UP}.weight_scale' is missing"),
        (added("model.layers.2.mlp.up_proj.weight"), "tensor 'model.layers.2.mlp.up_proj.weight' belongs to no layer"),
        (added(f"{UP}.weight_g_idx"), "weight_g_idx' belongs to no layer"),
        (changed("lm_head.weight", lambda t: t[:-1]), "has shape [287, 64], and config.json asks for [288, 64]"),
        (changed(f"{UP}.weight_packed", lambda t: t[:, 1:]), "has shape [128, 7], and config.json asks for [128, 8]"),
        (changed(f"{UP}.weight_packed", lambda t: t.long()), "weight_packed' is torch.int64, not torch.int32"),
        (changed(f"{UP}.weight_scale", lambda t: t.int()), "weight_scale' is torch.int32, not a floating-point type"),
        (changed(f"{UP}.weight_shape", lambda t: t.flip(0)), "weight_shape' says [64, 128], not [128, 64]"),
        (changed("lm_head.weight", lambda t: t.to(torch.int8)), "lm_head.weight' is torch.int8, not a floating-point"),
    ],
)
def test_bad_tensors(packed: Path, tmp_path: Path, change: Change, words: str) -> None:
    folder = shutil.copytree(packed, tmp_path / "bad")
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    with pytest.raises(InputError) as error:
        load_model(folder)
    assert words in str(error.value) and str(folder) in str(error.value)
    assert str(error.value).endswith("copy or export the folder again") and "\n" not in str(error.value)


@pytest.mark.parametrize("columns", [[3, 2], [0, 64], [-1, 5], [4, 4]], ids=["falling", "beyond", "negative", "twice"])
def test_bad_outlier_columns(plain: Path, tmp_path: Path, columns: list[int]) -> None:
    folder = write_packed(plain, tmp_path / "packed", scheme_named("LLM_INT8"), outliers=2)
    kept = torch.tensor(columns, dtype=torch.int32)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {f"{UP}.outlier_columns": kept}, folder / "model.safetensors")
    with pytest.raises(InputError, match="outlier_columns' is not an ascending list of columns below 64"):
        load_model(folder)


def test_bad_group_size(packed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(packed, tmp_path / "bad")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 48
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="q_proj: 64 input columns are not a multiple of group size 48"):
        load_model(folder)


def test_manifest_that_disagrees_with_the_shards(plain: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(plain, tmp_path / "told")
    empty: dict[str, object] = {
        "recipe": {},
        "recipe_sha256": "",
        "source": {},
        "calibration": None,
        "layers": [],
        "fallbacks": [],
    }
    manifest: dict[str, object] = {
        "schema_version": 1,
        **empty,
        "skipped": [],
        "versions": {},
        "size": {},
        "tensors": {"other": {}},
    }
    (folder / "lmpress.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="lmpress.json: tensor 'lm_head.weight' is absent there"):
        load_model(folder)
