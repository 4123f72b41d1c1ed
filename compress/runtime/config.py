"""What the decoder needs to know about a model, read from config.json; families differ in one table, not in classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.errors import InputError


class Unsupported(Exception):
    """A model that the decoder cannot run exactly as its config.json says; the message is the reason."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864). kind: a key of ROPE_FIELDS, which says what follows theta."""

    kind: str
    theta: float
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: float = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder. `windows` and `ropes` hold one entry per layer; a window of None sees all."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    norm_epsilon: float
    activation: str
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norm: bool
    norm_offset: float
    post_norms: bool
    embedding_scale: float
    query_scale: float
    attention_softcap: float | None
    final_softcap: float | None
    windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...]


Fields = Mapping[str, Any]


def _no_window(layer: int, fields: Fields) -> bool:
    return False


def _upper_layers(layer: int, fields: Fields) -> bool:
    return layer >= fields["max_window_layers"]


def _all_but_every(pattern: str) -> Callable[[int, Fields], bool]:
    return lambda layer, fields: (layer + 1) % fields[pattern] != 0


@dataclass(frozen=True)
class Family:
    """How one model_type departs from Llama.

    defaults: what transformers assumes where config.json is silent. Biases are a constant, or the field that says.
    layer_types: whether the field of that name counts; slides: whether a layer has a sliding window where it does not
    say. refused: fields that the decoder does not honour, so that a value there sends the model to transformers.
    """

    defaults: dict[str, Any] = field(default_factory=dict)
    activation_field: str = "hidden_act"
    activation: str = "silu"
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    head_norm: bool = False
    norm_offset: float = 0.0
    post_norms: bool = False
    scaled_embedding: bool = False
    softcaps: bool = False
    query_scalar: str | None = None
    layer_types: bool = True
    slides: Callable[[int, Fields], bool] = _no_window
    rope_theta: float = 10_000.0
    local_rope: bool = False
    refused: tuple[str, ...] = ()


_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_GEMMA2 = {**_GEMMA, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096}

FAMILIES = {
    "llama": Family(mlp_bias="mlp_bias", layer_types=False),
    "mistral": Family(
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        qkv_bias=False,
        output_bias=False,
        layer_types=False,
        slides=lambda layer, fields: True,
    ),
    "qwen2": Family(defaults=_QWEN, qkv_bias=True, output_bias=False, slides=_upper_layers),
    "qwen3": Family(defaults={**_QWEN, "head_dim": 128}, head_norm=True, slides=_upper_layers),
    "gemma": Family(
        defaults={**_GEMMA, "num_key_value_heads": 16},
        activation="gelu_pytorch_tanh",
        norm_offset=1.0,
        scaled_embedding=True,
        layer_types=False,
        refused=("use_bidirectional_attention",),
    ),
    "gemma2": Family(
        defaults={**_GEMMA2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "pattern": 2},
        activation_field="hidden_activation",
        activation="gelu_pytorch_tanh",
        norm_offset=1.0,
        post_norms=True,
        scaled_embedding=True,
        softcaps=True,
        query_scalar="query_pre_attn_scalar",
        slides=_all_but_every("pattern"),
        refused=("use_bidirectional_attention",),
    ),
    "gemma3_text": Family(
        defaults={**_GEMMA2, "sliding_window_pattern": 6},
        activation_field="hidden_activation",
        activation="gelu_pytorch_tanh",
        head_norm=True,
        norm_offset=1.0,
        post_norms=True,
        scaled_embedding=True,
        softcaps=True,
        query_scalar="query_pre_attn_scalar",
        slides=_all_but_every("sliding_window_pattern"),
        rope_theta=1_000_000.0,
        local_rope=True,
        refused=("use_bidirectional_attention", "attn_logit_softcapping"),
    ),
}

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
# What config.json calls the fields of Rope that follow `theta`, in their order.
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
MEND = "restore the model's own config.json"


def read_config(config: Fields, file: Path) -> ModelConfig:
    """The ModelConfig behind a parsed config.json; `file` is its path, for messages.

    Raises Unsupported where the decoder would not compute what config.json describes, InputError where a field is
    missing or cannot be.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise Unsupported(f"model_type {model_type!r} is not one of {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    fields = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, **family.defaults, **config}
    for name in family.refused:
        if fields.get(name):
            raise Unsupported(f"{name} is {fields[name]!r}, which the decoder does not honour")
    heads, kv_heads, head_dim = _heads(fields, file)
    hidden_size = _size(fields, "hidden_size", file)
    sliding = _sliding(family, fields, _size(fields, "num_hidden_layers", file), file)
    query_scalar = head_dim if family.query_scalar is None else _number(fields, family.query_scalar, file)
    return ModelConfig(
        family=model_type,
        vocab_size=_size(fields, "vocab_size", file),
        hidden_size=hidden_size,
        intermediate_size=_size(fields, "intermediate_size", file),
        layer_count=len(sliding),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=fields.get("max_position_embeddings") or 2048,
        norm_epsilon=_number(fields, "rms_norm_eps", file),
        activation=_activation(family, fields),
        tied=bool(fields["tie_word_embeddings"]),
        qkv_bias=_switch(family.qkv_bias, fields),
        output_bias=_switch(family.output_bias, fields),
        mlp_bias=_switch(family.mlp_bias, fields),
        head_norm=family.head_norm,
        norm_offset=family.norm_offset,
        post_norms=family.post_norms,
        embedding_scale=hidden_size**0.5 if family.scaled_embedding else 1.0,
        query_scale=query_scalar**-0.5,
        attention_softcap=fields.get("attn_logit_softcapping") if family.softcaps else None,
        final_softcap=fields.get("final_logit_softcapping") if family.softcaps else None,
        windows=tuple(_size(fields, "sliding_window", file) if slides else None for slides in sliding),
        ropes=_ropes(family, fields, sliding, file),
    )


def _heads(fields: Fields, file: Path) -> tuple[int, int, int]:
    """Query heads, key and value heads, and the width of one; the last two may be null, which means "derive it"."""
    heads = _size(fields, "num_attention_heads", file)
    kv_heads = heads if fields.get("num_key_value_heads") is None else _size(fields, "num_key_value_heads", file)
    if heads % kv_heads:
        raise InputError(
            f"{file}: field 'num_key_value_heads' is {kv_heads}, which does not divide {heads} heads: {MEND}"
        )
    if fields.get("head_dim") is not None:
        return heads, kv_heads, _size(fields, "head_dim", file)
    return heads, kv_heads, _size(fields, "hidden_size", file) // heads


def _activation(family: Family, fields: Fields) -> str:
    name = fields.get(family.activation_field, family.activation)
    if name == "gelu" and fields["model_type"] == "gemma":
        name = "gelu_pytorch_tanh"  # "gelu" is what Gemma's first release wrote, and never meant.
    if name not in ACTIVATIONS:
        raise Unsupported(f"{family.activation_field} is {name!r}, not one of {', '.join(ACTIVATIONS)}")
    return name


def _size(fields: Fields, name: str, file: Path) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{file}: field {name!r} is {value!r}, not a positive integer: {MEND}")
    return value


def _number(fields: Fields, name: str, file: Path) -> float:
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise InputError(f"{file}: field {name!r} is {value!r}, not a positive number: {MEND}")
    return value


def _switch(rule: bool | str, fields: Fields) -> bool:
    return bool(fields.get(rule)) if isinstance(rule, str) else rule


def _sliding(family: Family, fields: Fields, layer_count: int, file: Path) -> list[bool]:
    """Which layers see only the last `sliding_window` tokens."""
    windowless = fields.get("sliding_window") is None or not fields.get("use_sliding_window", True)
    kinds = fields.get("layer_types") if family.layer_types else None
    if kinds is None:
        return [not windowless and family.slides(layer, fields) for layer in range(layer_count)]
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise Unsupported(f"layer_types holds {sorted(unknown)}, which the decoder does not know")
    if len(kinds) != layer_count:
        raise InputError(f"{file}: field 'layer_types' has {len(kinds)} entries for {layer_count} layers: {MEND}")
    sliding = [kind == "sliding_attention" for kind in kinds]
    if windowless and any(sliding):
        raise InputError(f"{file}: field 'layer_types' asks for a sliding window, and there is none: {MEND}")
    return sliding


def _ropes(family: Family, fields: Fields, sliding: list[bool], file: Path) -> tuple[Rope, ...]:
    """One Rope per layer, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    parameters = fields.get("rope_parameters") or {}
    scaling = fields.get("rope_scaling") or {}
    nested = any(isinstance(value, dict) for value in parameters.values())
    if nested != family.local_rope and parameters:
        raise Unsupported("rope_parameters are per layer type" if nested else "rope_parameters name no layer type")
    theta = fields.get("rope_theta", family.rope_theta)
    if not family.local_rope:
        return (_rope(scaling or parameters, theta, fields, file),) * len(sliding)
    everywhere = _rope({**(parameters.get("full_attention") or {}), **scaling}, theta, fields, file)
    local_theta = fields.get("rope_local_base_freq", 10_000.0)
    local = _rope(parameters.get("sliding_attention") or {}, local_theta, fields, file)
    return tuple(local if slides else everywhere for slides in sliding)


def _rope(parameters: Fields, theta: float, fields: Fields, file: Path) -> Rope:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ROPE_FIELDS:
        raise Unsupported(f"rope_type is {kind!r}, not one of {', '.join(ROPE_FIELDS)}")
    if (parameters.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0) != 1.0:
        raise Unsupported("partial_rotary_factor is set, which the decoder does not honour")
    values = {
        "rope_theta": theta,
        "original_max_position_embeddings": fields.get("max_position_embeddings"),
        **parameters,
    }
    names = ("rope_theta", *ROPE_FIELDS[kind])
    return Rope(kind, *(_number(values, name, file) for name in names))
