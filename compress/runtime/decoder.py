"""The decoder: embedding, blocks of attention and gated MLP, head. One class for all families, which differ in data.

Parameter names are those of transformers, so that checkpoints load by name. B sequences of T tokens, H query heads, h
key and value heads of width d, S keys. Attention follows arXiv 1706.03762 with rotary positions (2104.09864) and
grouped queries (2305.13245).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.runtime.cache import Cache
from compress.runtime.config import ModelConfig, Rope

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}

# Query rows whose capped scores are held at a time: a few MiB per head instead of T x S.
QUERY_ROWS = 256


@dataclass(frozen=True)
class View:
    """What T queries see of the last `keys` keys. mask: bool [T, keys], None if all. triangle: it is plainly causal."""

    keys: int
    mask: Tensor | None
    triangle: bool


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv 1910.07467), in float32. With an offset (Gemma) the weight counts from there."""

    def __init__(self, width: int, epsilon: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        normed = x.float()
        normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + self.epsilon)
        if self.offset:
            return (normed * (self.offset + self.weight.float())).to(x.dtype)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention of one layer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        width, head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.heads * head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, config.kv_heads * head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, config.kv_heads * head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * head_dim, width, bias=config.output_bias)
        if config.head_norm:
            self.q_norm = RMSNorm(head_dim, config.norm_epsilon, config.norm_offset)
            self.k_norm = RMSNorm(head_dim, config.norm_epsilon, config.norm_offset)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], view: View, cache: Cache | None) -> Tensor:
        split = (*x.shape[:2], -1, self.config.head_dim)
        query, key, value = self.q_proj(x).view(split), self.k_proj(x).view(split), self.v_proj(x).view(split)
        if self.config.head_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        query, key = rotate(query, rotation), rotate(key, rotation)
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        attended = attend(query, key[:, :, -view.keys :], value[:, :, -view.keys :], view, self.config)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Gated linear unit (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention, then MLP, each on a normed copy of the stream; Gemma 2 and 3 norm what comes back as well."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        norm = partial(RMSNorm, config.hidden_size, config.norm_epsilon, config.norm_offset)
        self.post_norms = config.post_norms
        self.input_layernorm = norm()
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = norm()
        if config.post_norms:
            self.pre_feedforward_layernorm = norm()
            self.post_feedforward_layernorm = norm()
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], view: View, cache: Cache | None) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), rotation, view, cache)
        if self.post_norms:
            x = x + self.post_attention_layernorm(attended)
            return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Stack(nn.Module):
    """Everything below the head: what transformers' names call `model`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.layer_count))
        self.norm = RMSNorm(config.hidden_size, config.norm_epsilon, config.norm_offset)


class Decoder(nn.Module):
    """The whole model. `hidden` and `logits` are apart, so that a long text's logits can be had in chunks."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Stack(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def hidden(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """tokens [B, T], which follow those in `cache`: hidden states [B, T, D] after the last norm."""
        x = self.model.embed_tokens(tokens)
        if self.config.embedding_scale != 1.0:
            # Rounded to the weights' dtype first, as the models were trained.
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype, device=x.device)
        start, count = 0 if cache is None else cache.length, tokens.shape[1]
        views = {window: see(start, count, window, x.device) for window in set(self.config.windows)}
        rotations = {rope: self._rotation(rope, start, count, x) for rope in set(self.config.ropes)}
        for block, window, rope in zip(self.model.layers, self.config.windows, self.config.ropes, strict=True):
            x = block(x, rotations[rope], views[window], cache)
        if cache is not None:
            cache.advance(count)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D]: next-token logits [..., V], in the dtype of hidden."""
        logits = self.lm_head(hidden)
        cap = self.config.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def new_cache(self, batch: int, capacity: int) -> Cache:
        return Cache(self.config, batch, capacity, self.model.norm.weight)

    def _rotation(self, rope: Rope, start: int, count: int, x: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + count, dtype=torch.float32, device=x.device)
        angles = torch.outer(positions, frequencies(rope, self.config.head_dim).to(x.device))
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each pair of channels: float32 [d / 2]. "llama3" came with Llama 3.1."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    # Waves longer than the original context are stretched, short ones kept, those between blended.
    turns = rope.original_context * plain / (2 * math.pi)
    blend = (turns - rope.low_frequency_factor) / (rope.high_frequency_factor - rope.low_frequency_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """x [B, H, T, d] turned by its positions; channel i pairs with i + d / 2."""
    cosine, sine = rotation
    left, right = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-right, left), dim=-1) * sine


def see(start: int, count: int, window: int | None, device: torch.device) -> View:
    """What `count` queries after `start` earlier tokens see, each itself and the `window - 1` before it."""
    keys = start + count
    if window is not None:
        keys = min(keys, window + count - 1)  # Older ones are out of every query's sight.
    if count == 1:
        return View(keys, None, False)
    query = torch.arange(keys - count, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    mask = key <= query
    cuts = window is not None and window < keys
    if window is not None and cuts:
        mask &= key > query - window
    return View(keys, mask, keys == count and not cuts)


def attend(query: Tensor, key: Tensor, value: Tensor, view: View, config: ModelConfig) -> Tensor:
    """query [B, H, T, d], key and value [B, h, S, d], of which query head i uses number i // (H / h): [B, H, T, d]."""
    if config.attention_softcap is not None:
        return _attend_capped(query, key, value, view, config)
    mask = None if view.triangle else view.mask
    grouped = config.heads != config.kv_heads
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=view.triangle, scale=config.query_scale, enable_gqa=grouped
    )


def _attend_capped(query: Tensor, key: Tensor, value: Tensor, view: View, config: ModelConfig) -> Tensor:
    """Attention whose scores pass through cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118, section 2)."""
    cap = config.attention_softcap
    assert cap is not None
    grouped = query.unflatten(1, (config.kv_heads, -1))  # [B, h, H / h, T, d]
    keys, values = key.unsqueeze(2).transpose(-1, -2), value.unsqueeze(2)
    parts = []
    for start in range(0, query.shape[2], QUERY_ROWS):
        rows = slice(start, start + QUERY_ROWS)
        scores = grouped[..., rows, :] @ keys * config.query_scale
        scores = cap * torch.tanh(scores / cap)
        if view.mask is not None:
            scores = scores.masked_fill(~view.mask[rows], -torch.inf)
        parts.append(scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ values)
    return torch.cat(parts, dim=-2).flatten(1, 2)
