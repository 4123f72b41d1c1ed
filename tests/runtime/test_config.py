"""Reading config.json: old and new spellings, defaults that transformers assumes, what is refused and what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from compress.errors import InputError
from compress.runtime.config import FAMILIES, Unsupported, read_config
from tests.runtime.families import CASES, LINEAR, LLAMA3, Case
from tests.tiny import TINY

FILE = Path("somewhere/config.json")
BARE = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 12}


def read(model_type: str, **changes: Any) -> Any:
    return read_config({"model_type": model_type, **TINY, **changes}, FILE)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_saved_config_reads_like_the_arguments(tmp_path: Path, case: Case) -> None:
    AutoConfig.for_model(case.model_type, **TINY | case.changes).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert read_config(saved, FILE) == read(case.model_type, **case.changes)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    """A config.json that says little means what transformers takes it to mean."""
    bare = {"model_type": model_type, **BARE, "num_attention_heads": 32}
    AutoConfig.for_model(**bare).save_pretrained(tmp_path)
    full = json.loads((tmp_path / "config.json").read_text())
    assert read_config({**bare, "max_position_embeddings": full["max_position_embeddings"]}, FILE) == read_config(
        full, FILE
    )


def test_rope_before_transformers_5() -> None:
    theta, scaling = 5e5, {key: value for key, value in LLAMA3.items() if key not in ("rope_theta", "rope_type")}
    new = read("llama", rope_parameters=LLAMA3)
    assert read("llama", rope_theta=theta, rope_scaling={**scaling, "rope_type": "llama3"}) == new
    assert read("llama", rope_theta=theta, rope_scaling={**scaling, "type": "llama3"}) == new
    assert read("llama", rope_scaling={"type": "linear", "factor": 4.0}) == read("llama", rope_parameters=LINEAR)


def test_gemma3_ropes_before_transformers_5() -> None:
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    ropes = read("gemma3_text", **old, num_hidden_layers=6, sliding_window_pattern=3).ropes
    assert [(rope.kind, rope.theta, rope.factor) for rope in ropes[1:4]] == [
        ("default", 1e4, 1.0),
        ("linear", 1e6, 8.0),
        ("default", 1e4, 1.0),
    ]
    nested = {"full_attention": {**LINEAR, "rope_theta": 1e6, "factor": 8.0}, "sliding_attention": {"rope_theta": 1e4}}
    assert read("gemma3_text", rope_parameters=nested, num_hidden_layers=6, sliding_window_pattern=3).ropes == ropes


def test_windows() -> None:
    assert read("mistral", sliding_window=5).windows == (5, 5)
    assert read("llama", sliding_window=5).windows == (None, None)
    assert read("qwen2", sliding_window=5, max_window_layers=1).windows == (None, None)
    assert read("qwen2", sliding_window=5, max_window_layers=1, use_sliding_window=True).windows == (None, 5)
    assert read("gemma2", sliding_window=5).windows == (5, None)
    assert read("gemma2", sliding_window=5, layer_types=["full_attention", "sliding_attention"]).windows == (None, 5)
    assert read("gemma3_text", sliding_window=5, num_hidden_layers=7).windows == (5, 5, 5, 5, 5, None, 5)


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("gpt2", {}, "model_type 'gpt2'"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"hidden_act": "relu6"}, "hidden_act is 'relu6'"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"rope_parameters": LINEAR}, "name no layer type"),
    ],
)
def test_what_the_decoder_leaves_to_transformers(model_type: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        read(model_type, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "field 'hidden_size' is None"),
        ({"vocab_size": "many"}, "field 'vocab_size' is 'many'"),
        ({"num_hidden_layers": 0}, "field 'num_hidden_layers' is 0"),
        ({"num_key_value_heads": 3}, "field 'num_key_value_heads' is 3"),
        ({"rms_norm_eps": None}, "field 'rms_norm_eps' is None"),
        ({"rope_scaling": {"type": "linear"}}, "field 'factor' is None"),
        ({"layer_types": ["full_attention"]}, "field 'layer_types' has 1 entries for 2 layers"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "field 'layer_types' asks for a sliding window"),
    ],
)
def test_what_is_wrong(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        read("qwen2", **changes)
    assert words in str(error.value)
    assert str(error.value).startswith(str(FILE)) and str(error.value).endswith("restore the model's own config.json")
