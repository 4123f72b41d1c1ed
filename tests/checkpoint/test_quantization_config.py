"""quantization_config: compressed-tensors agrees with what is written and with how it is read; the rest is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from compress.checkpoint.quantization_config import build, describe, parse
from compress.errors import InputError
from compress.formats.scheme import SCHEMES, Scheme, scheme_named

W4, W4_ASYM, W8, W8A8 = (scheme_named(name) for name in ("W4A16", "W4A16_ASYM", "W8A16", "W8A8"))
W4_32, W4_CHANNEL = scheme_named("W4A16", 32), scheme_named("W4A16", "channel")
LLM_INT8 = SCHEMES["LLM_INT8"]
MODULES = [f"model.layers.{layer}.{part}" for layer in (0, 1) for part in ("self_attn.q_proj", "mlp.up_proj")]
LINEARS = [*MODULES, "lm_head"]


def built(*schemes: Scheme) -> dict[str, Any]:
    """The config of MODULES under these schemes in turn, lm_head left alone, as JSON gives it back."""
    chosen = {module: schemes[number % len(schemes)] for number, module in enumerate(MODULES)}
    return json.loads(json.dumps(build(chosen, ["lm_head"], torch.bfloat16)))


SAYABLE = {
    "W4A16": (W4,),
    "W4A16_ASYM": (W4_ASYM,),
    "W8A16": (W8,),
    "W8A8": (W8A8,),
    "group 32": (W4_32,),
    "channel": (W4_CHANNEL,),
    "two sizes": (W4, W8),
    "two formats": (W4, W8A8),
}


@pytest.mark.parametrize("case", SAYABLE)
def test_compressed_tensors_reads_what_is_written(case: str) -> None:
    config = built(*SAYABLE[case])
    found = QuantizationConfig.model_validate(config)
    assert found.quant_method == "compressed-tensors" and found.ignore == ["lm_head"]
    assert found.quantization_status == "compressed"
    assert len(found.config_groups) == len(SAYABLE[case])
    formats = {scheme.format for scheme in SAYABLE[case]}
    assert found.format == (formats.pop() if len(formats) == 1 else "mixed-precision")
    for group, scheme in zip(found.config_groups.values(), SAYABLE[case], strict=True):
        assert (group.weights.num_bits, group.weights.symmetric) == (scheme.grid.bits, scheme.grid.symmetric)
        assert group.weights.strategy == ("channel" if scheme.grid.group_size is None else "group")
        assert group.weights.group_size == scheme.grid.group_size and not group.weights.dynamic
        assert group.format == scheme.format and group.output_activations is None
        if scheme.activation_bits is None:
            assert group.input_activations is None
        else:
            inputs = group.input_activations
            assert (inputs.num_bits, inputs.strategy, inputs.dynamic, inputs.symmetric) == (8, "token", True, True)


@pytest.mark.parametrize("schemes", [*SAYABLE.values(), (LLM_INT8,), (LLM_INT8, W4), (W8A8, LLM_INT8, W4_ASYM)])
def test_written_configs_are_read_back(schemes: tuple[Scheme, ...]) -> None:
    config = built(*schemes)
    wanted = {module: schemes[number % len(schemes)] for number, module in enumerate(MODULES)}
    assert parse(config, LINEARS) == wanted
    assert parse({"model_type": "llama", "quantization_config": config}, LINEARS) == wanted
    assert config["quant_method"] == ("lmpress" if LLM_INT8 in schemes else "compressed-tensors")


def test_outlier_columns_are_written_as_ours() -> None:
    config = built(LLM_INT8, W4)
    assert (config["version"], config["dtype"], config["format"]) == (1, "bfloat16", "mixed-precision")
    outlier, plain = config["config_groups"].values()
    assert (outlier["scheme"], outlier["format"], outlier["outliers"]) == (
        "LLM_INT8",
        "int8-outlier",
        {"threshold": 6.0},
    )
    assert (plain["scheme"], plain["format"], plain["outliers"]) == ("W4A16", "pack-quantized", None)
    with pytest.raises(InputError, match="version: is 2: use the lmpress that wrote it"):
        parse(config | {"version": 2}, LINEARS)


def test_nothing_to_write_and_nothing_to_read() -> None:
    with pytest.raises(ValueError, match="no layer is compressed"):
        build({}, ["lm_head"], torch.bfloat16)
    assert parse({"model_type": "llama"}, LINEARS) == {}


TARGETS = {
    "class": (["Linear"], ["lm_head"]),
    "regex": (["re:.*q_proj$", "re:model.layers.1.*"], []),
    "regex is matched from the start": (["re:layers", "re:model.layers.0"], []),
    "names": (["model.layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj"], []),
    "ignored by regex": (["Linear"], ["re:.*up_proj", "lm_head", "not.there"]),
    "ignore nothing": (["Linear"], None),
}


@pytest.mark.parametrize("case", TARGETS)
def test_targets_mean_what_they_mean_to_compressed_tensors(case: str) -> None:
    targets, ignore = TARGETS[case]
    config = built(W4) | {"ignore": ignore}
    config["config_groups"]["group_0"]["targets"] = targets
    model = skeleton()
    apply_quantization_config(model, QuantizationConfig.model_validate(config), show_progress=False)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    wanted = {name for name in linears if hasattr(model.get_submodule(name), "quantization_scheme")}
    assert wanted and parse(config, linears).keys() == wanted


def test_exact_names_win_over_patterns_and_patterns_over_the_class() -> None:
    config = built(W4, W8, W8A8)
    groups = config["config_groups"]
    groups["group_0"]["targets"], groups["group_1"]["targets"] = ["Linear"], ["re:.*q_proj"]
    groups["group_2"]["targets"] = [MODULES[0]]
    model = skeleton()
    apply_quantization_config(model, QuantizationConfig.model_validate(config), show_progress=False)
    found = parse(config, [name for name, module in model.named_modules() if isinstance(module, nn.Linear)])
    assert [found[module] for module in MODULES] == [W8A8, W4, W8, W4]
    for name, scheme in found.items():
        assert model.get_submodule(name).quantization_scheme.weights.num_bits == scheme.grid.bits


def skeleton() -> Any:
    config = AutoConfig.for_model(
        "llama", hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def llm_compressor(**weights: Any) -> dict[str, Any]:
    """What llm-compressor 0.14 writes for W4A16."""
    return {
        "config_groups": {
            "group_0": {
                "format": "pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": 64,
                    "num_bits": 4,
                    "observer": "memoryless_minmax",
                    "observer_kwargs": {},
                    "scale_dtype": None,
                    "strategy": "group",
                    "symmetric": True,
                    "type": "int",
                    "zp_dtype": None,
                }
                | weights,
            }
        },
        "format": "pack-quantized",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.19.0",
    }


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, scheme_named("W4A16", 64)),
        ({"actorder": "static"}, scheme_named("W4A16", 64)),
        ({"symmetric": False, "zp_dtype": "torch.int8"}, scheme_named("W4A16_ASYM", 64)),
        ({"strategy": "channel", "group_size": None}, W4_CHANNEL),
        ({"strategy": None, "group_size": -1}, W4_CHANNEL),
        ({"num_bits": 8, "group_size": 128}, W8),
    ],
)
def test_other_tools_configs_are_read(changes: dict[str, Any], wanted: Scheme) -> None:
    assert parse(llm_compressor(**changes), LINEARS) == dict.fromkeys(MODULES, wanted)


def test_minimal_and_preset_configs_are_read() -> None:
    minimal = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    weights = {"num_bits": 4, "strategy": "group", "group_size": 128}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    assert parse(minimal | {"config_groups": groups}, LINEARS) == dict.fromkeys(MODULES, W4)
    assert parse(minimal | {"config_groups": {"W8A16": ["Linear"]}}, LINEARS) == dict.fromkeys(MODULES, W8)
    with pytest.raises(InputError, match="preset 'NVFP4' cannot be run here"):
        parse(minimal | {"config_groups": {"NVFP4": ["Linear"]}}, LINEARS)


TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "float weights": ({"type": "float"}, {}, {}, "weights.type: is 'float'"),
    "3 bits": ({"num_bits": 3}, {}, {}, "weights.num_bits: is 3"),
    "act-order by group": ({"actorder": "group"}, {}, {}, "weights.actorder: is 'group'"),
    "dynamic weights": ({"dynamic": True}, {}, {}, "weights.dynamic: is True"),
    "one scale": ({"strategy": "tensor", "group_size": None}, {}, {}, "strategy 'tensor' with group_size None"),
    "no strategy": ({"strategy": None, "group_size": None}, {}, {}, "strategy 'tensor'"),
    "group 0": ({"group_size": 0}, {}, {}, "group_size 0"),
    "group is text": ({"strategy": None, "group_size": "64"}, {}, {}, "group_size '64'"),
    "W8A16 asymmetric": ({"num_bits": 8, "symmetric": False}, {}, {}, "W8A16, asymmetric, group size 64"),
    "W4A8": ({}, {"input_activations": TOKENS}, {}, "W4A8, symmetric, group size 64, stored as 'pack-quantized'"),
    "grouped W8A8": ({"num_bits": 8}, {"input_activations": TOKENS, "format": "int-quantized"}, {}, "group size 64"),
    "static activations": (
        {},
        {"input_activations": TOKENS | {"dynamic": False, "strategy": "tensor"}},
        {},
        "input_activations.dynamic: is False",
    ),
    "fp8 activations": (
        {},
        {"input_activations": TOKENS | {"type": "float"}},
        {},
        "activations.type: is 'float'",
    ),
    "outputs": ({}, {"output_activations": TOKENS}, {}, "output_activations: quantized outputs"),
    "unknown format": ({}, {"format": "marlin-24"}, {}, "stored as 'marlin-24'"),
    "weights a list": ({}, {"weights": []}, {}, "weights: is not an object"),
    "targets missing": ({}, {"targets": None}, {}, "targets: is not a list of names"),
    "bad pattern": ({}, {"targets": ["re:("]}, {}, "'re:(' is not a regular expression"),
    "another class": ({}, {"targets": ["Embedding"]}, {}, "target 'Embedding' is no linear layer of this model"),
    "another module": ({}, {"targets": ["model.layers.9.mlp"]}, {}, "target 'model.layers.9.mlp'"),
    "kv cache": ({}, {}, {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme: is set"),
    "rotations": ({}, {}, {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config: is set"),
    "sparse": ({}, {}, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: is set"),
    "not compressed": ({}, {}, {"quantization_status": "frozen"}, "quantization_status: is 'frozen'"),
    "groups a list": ({}, {}, {"config_groups": []}, "config_groups: is not an object"),
    "group a number": ({}, {}, {"config_groups": {"group_0": 1}}, "group_0: is not an object"),
    "threshold is text": ({}, {"outliers": {"threshold": "6"}}, {}, "outliers.threshold: is '6'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_refused(case: str) -> None:
    weights, group, top, phrase = REFUSED[case]
    config = llm_compressor(**weights)
    config["config_groups"]["group_0"] |= group
    with pytest.raises(InputError) as caught:
        parse(config | top, LINEARS)
    message = str(caught.value)
    assert phrase in message and message.startswith("config.json: quantization_config") and "\n" not in message


def test_dense_sparsity_is_no_sparsity() -> None:
    config = llm_compressor() | {"sparsity_config": {"format": "dense", "global_sparsity": 0.0}}
    assert parse(config, LINEARS) == dict.fromkeys(MODULES, scheme_named("W4A16", 64))


DESCRIBED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, "GPTQ, 4 bits, group size 128"),
    ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "GPTQ, 8 bits"),
    ({"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 64}, "AWQ, 4 bits, group size 64"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes, 8 bits"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes, 4 bits, nf4"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "FP8"),
    ({"quant_method": "mxfp4"}, "mxfp4"),
    ({"bits": 4}, "an unnamed method, 4 bits"),
    (llm_compressor(), "compressed-tensors, 4 bits, group size 64, pack-quantized"),
    (built(W4, W8A8), "compressed-tensors, 4 bits, group size 128, 8 bits, mixed-precision"),
    (built(LLM_INT8), "lmpress, 8 bits, int8-outlier"),
    ({"quant_method": "modelopt", "config_groups": "?"}, "modelopt"),
]


@pytest.mark.parametrize(("config", "phrase"), DESCRIBED)
def test_quantized_models_are_described_in_a_phrase(config: dict[str, Any], phrase: str) -> None:
    assert describe({"model_type": "llama", "quantization_config": config}) == phrase


def test_other_methods_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="is GPTQ, 4 bits, group size 128, which cannot be run here"):
        parse({"quantization_config": DESCRIBED[0][0]}, LINEARS)
    assert describe({"model_type": "llama"}) == "not quantized"
    with pytest.raises(InputError, match="is not an object"):
        describe({"quantization_config": []})
