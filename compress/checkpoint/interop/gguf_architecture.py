"""The decoders that both sides know: which tensor goes where, how rows are ordered, what the metadata says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import pi
from typing import Protocol

import torch
from torch import Tensor

from compress.checkpoint.interop.gguf_file import float32, string, uint32
from compress.errors import InputError


class RopeShape(Protocol):
    """Rotary position embedding of one layer, as compress.runtime.config.Rope describes it."""

    @property
    def kind(self) -> str: ...
    @property
    def theta(self) -> float: ...
    @property
    def factor(self) -> float: ...
    @property
    def low_frequency_factor(self) -> float: ...
    @property
    def high_frequency_factor(self) -> float: ...
    @property
    def original_context(self) -> float: ...


class DecoderShape(Protocol):
    """What of compress.runtime.config.ModelConfig a GGUF file has to say."""

    @property
    def family(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def layer_count(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def norm_epsilon(self) -> float: ...
    @property
    def activation(self) -> str: ...
    @property
    def tied(self) -> bool: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def output_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def head_norm(self) -> bool: ...
    @property
    def windows(self) -> Sequence[int | None]: ...
    @property
    def ropes(self) -> Sequence[RopeShape]: ...


@dataclass(frozen=True)
class Architecture:
    """What llama.cpp makes of a family. name: its word for it. paired: it turns neighbouring rows of a head together,
    where transformers turns the halves, so that rows of q and k change places. extras: it has a place for biases of the
    output and MLP projections, and for Llama 3's rope factors. square: heads x head_dim must be the hidden size."""

    name: str
    paired: bool = False
    extras: bool = False
    square: bool = False


LLAMA = Architecture("llama", paired=True, extras=True)
ARCHITECTURES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": Architecture("qwen2", square=True),
    "qwen3": Architecture("qwen3"),
}
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Piece:
    """One tensor: its name in transformers and in GGUF, its shape, and the heads within which rows change places."""

    source: str
    target: str
    shape: tuple[int, ...]
    heads: int | None = None

    @property
    def module(self) -> str:
        return self.source.rpartition(".")[0]


def architecture_of(shape: DecoderShape, place: object) -> Architecture:
    """llama.cpp's architecture for a decoder. Raises InputError, naming `place`, where it would compute otherwise."""
    known = ARCHITECTURES.get(shape.family)
    reason = None
    if known is None:
        reason = f"model_type {shape.family!r} is not one of {', '.join(ARCHITECTURES)}"
    elif shape.activation != "silu":
        reason = f"its activation is {shape.activation!r}, and llama.cpp computes silu"
    elif not known.extras and (shape.output_bias or shape.mlp_bias):
        reason = f"llama.cpp's {known.name} has no place for biases of the output and MLP projections"
    elif not known.extras and shape.ropes[0].kind == "llama3":
        reason = f"llama.cpp's {known.name} has no place for rope_type 'llama3'"
    elif known.square and shape.heads * shape.head_dim != shape.hidden_size:
        reason = f"llama.cpp's {known.name} wants heads x head_dim to be the hidden size {shape.hidden_size}"
    if known is None or reason is not None:
        raise InputError(f"{place}: cannot be put into a GGUF file: {reason}: export it as 'dense' instead")
    return known


def pieces(shape: DecoderShape, architecture: Architecture) -> Iterator[Piece]:
    """Every tensor of the model but the head, in the order of the file."""
    yield Piece(EMBEDDING, "token_embd.weight", (shape.vocab_size, shape.hidden_size))
    for layer in range(shape.layer_count):
        for source, target, rows, columns, heads, bias in _projections(shape, architecture):
            source, target = f"model.layers.{layer}.{source}", f"blk.{layer}.{target}"
            yield Piece(f"{source}.weight", f"{target}.weight", (rows, columns), heads)
            if bias:
                yield Piece(f"{source}.bias", f"{target}.bias", (rows,), heads)
        for source, target, size in _norms(shape):
            yield Piece(f"model.layers.{layer}.{source}.weight", f"blk.{layer}.{target}.weight", (size,))
    yield Piece("model.norm.weight", "output_norm.weight", (shape.hidden_size,))


def head_piece(shape: DecoderShape) -> Piece:
    """The head, where it is not the embedding."""
    return Piece(HEAD, "output.weight", (shape.vocab_size, shape.hidden_size))


def paired_rows(rows: int, heads: int) -> Tensor:
    """Where the rows of a q or k projection come from: rows i and i + half of a head end up side by side."""
    return torch.arange(rows).view(heads, 2, rows // heads // 2).transpose(1, 2).flatten()


def rope_factors(rope: RopeShape, head_dim: int) -> Tensor:
    """float32 [head_dim / 2]: what Llama 3.1's scaled rope divides each frequency by."""
    frequency = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = rope.original_context * frequency / (2 * pi)
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / rope.factor + smooth)).float()


def metadata(shape: DecoderShape, architecture: Architecture) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The model's metadata, and what a reader should know about it."""
    name, rope = architecture.name, shape.ropes[0]
    windows = [window for window in shape.windows if window is not None]
    context = min([shape.context_length, *windows])
    found = {
        f"{name}.vocab_size": uint32(shape.vocab_size),
        f"{name}.context_length": uint32(context),
        f"{name}.embedding_length": uint32(shape.hidden_size),
        f"{name}.block_count": uint32(shape.layer_count),
        f"{name}.feed_forward_length": uint32(shape.intermediate_size),
        f"{name}.attention.head_count": uint32(shape.heads),
        f"{name}.attention.head_count_kv": uint32(shape.kv_heads),
        f"{name}.attention.key_length": uint32(shape.head_dim),
        f"{name}.attention.value_length": uint32(shape.head_dim),
        f"{name}.attention.layer_norm_rms_epsilon": float32(shape.norm_epsilon),
        f"{name}.rope.dimension_count": uint32(shape.head_dim),
        f"{name}.rope.freq_base": float32(rope.theta),
    }
    if rope.kind == "linear":
        found[f"{name}.rope.scaling.type"] = string("linear")
        found[f"{name}.rope.scaling.factor"] = float32(rope.factor)
    if context == shape.context_length:
        return found, ()
    limit = f"llama.cpp's {name} has no sliding window"
    return found, (f"{limit}: the file says a context of {context} tokens, within which the windows cut nothing",)


def _projections(shape: DecoderShape, architecture: Architecture) -> list[tuple[str, str, int, int, int | None, bool]]:
    """Of one layer: names in transformers and GGUF, rows, columns, heads to re-order rows in, whether it has a bias."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    heads, kv_heads = (shape.heads, shape.kv_heads) if architecture.paired else (None, None)
    return [
        ("self_attn.q_proj", "attn_q", query, hidden, heads, shape.qkv_bias),
        ("self_attn.k_proj", "attn_k", key, hidden, kv_heads, shape.qkv_bias),
        ("self_attn.v_proj", "attn_v", key, hidden, None, shape.qkv_bias),
        ("self_attn.o_proj", "attn_output", hidden, query, None, shape.output_bias),
        ("mlp.gate_proj", "ffn_gate", inner, hidden, None, shape.mlp_bias),
        ("mlp.up_proj", "ffn_up", inner, hidden, None, shape.mlp_bias),
        ("mlp.down_proj", "ffn_down", hidden, inner, None, shape.mlp_bias),
    ]


def _norms(shape: DecoderShape) -> list[tuple[str, str, int]]:
    """Of one layer: names in transformers and GGUF, and size."""
    norms = [
        ("input_layernorm", "attn_norm", shape.hidden_size),
        ("post_attention_layernorm", "ffn_norm", shape.hidden_size),
    ]
    if shape.head_norm:
        norms += [
            ("self_attn.q_norm", "attn_q_norm", shape.head_dim),
            ("self_attn.k_norm", "attn_k_norm", shape.head_dim),
        ]
    return norms
