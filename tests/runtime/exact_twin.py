"""The native decoder's arithmetic in plain torch, operation for operation and in the same order: a slow oracle.

A fused multiply-add rounds once; float64 holds the product of two float32 exactly, so that one more rounding gives the
same number but for one case in a billion. Sums run in the order of the C++ kernels: over groups, over the channels of a
head, over keys; lanes are joined in halves.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compress.checkpoint import open_checkpoint
from compress.checkpoint.quantization_config import stored_schemes
from compress.formats import format_named
from compress.formats.grid import Quantized
from compress.runtime.config import ModelConfig
from compress.runtime.load import Model
from compress.runtime.native import NativeDecoder

KEYS = 128  # keys per block of the online softmax
LANES = 16


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a.double() * b.double() + c.double()).float()


def constant(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def join_lanes(lanes: Tensor) -> Tensor:
    """[..., 16] -> [...]: halves added to halves."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def exponential(x: Tensor) -> Tensor:
    inside = x.clamp(-87.0, 88.0)
    turns = (inside * constant(1.44269504088896341)).round()
    rest = fma(turns, constant(-0.693359375), inside)
    rest = fma(turns, constant(2.12194440e-4), rest)
    series = constant(1.9875691500e-4).expand_as(x)
    for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        series = fma(series, rest, constant(term))
    series = fma(series, rest * rest, rest + 1.0)
    return torch.where(x < -87.0, 0.0, torch.ldexp(series, turns))


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    squares = torch.zeros(*x.shape[:-1], LANES)
    for part in x.split(LANES, dim=-1):
        squares = fma(part, part, squares)
    # torch's own float32 square root is not always the nearest number.
    factor = 1.0 / (join_lanes(squares) / x.shape[-1] + constant(epsilon)).double().sqrt().float()
    return x * factor[..., None] * weight


def linear(x: Tensor, weight: Quantized) -> Tensor:
    """x [T, K] on int8 grids, one step per group, times a symmetric weight [N, K] in groups."""
    rows, groups = weight.scale.shape
    grouped = x.view(len(x), groups, -1)
    step = grouped.abs().amax(-1, keepdim=True) / 127.0
    step = torch.where(step == 0, 1.0, step)
    integers = (grouped / step).round().clamp(-128, 127)
    q = weight.q.view(rows, groups, -1).float()
    total = torch.zeros(len(x), rows)
    for group in range(groups):
        exact = integers[:, group] @ q[:, group].T  # sums of a few thousand products of 10 bits: exact in float32
        total = fma(exact * weight.scale[:, group].float(), step[:, group], total)
    return total


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x [T, H, d] by tables [T, d / 2]."""
    left, right = x.chunk(2, dim=-1)
    cosine, sine = cosine[:, None], sine[:, None]
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of T new tokens [T, H, d], with keys and values [T, H, d] repeated for their groups."""
    count, heads, size = query.shape
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    largest = torch.full((heads, count), -1e30)
    total = torch.zeros(heads, count)
    values = torch.zeros(heads, count, size)
    for start in range(0, count, KEYS):
        keys = key[:, start : start + KEYS]
        scores = torch.zeros(heads, count, keys.shape[1])
        for channel in range(size):
            scores = fma(keys[:, None, :, channel], query[:, :, None, channel], scores)
        seen = torch.arange(start, start + keys.shape[1]) <= torch.arange(count)[:, None]
        scores = torch.where(seen, scores * constant(scale), -2e30)
        peak = torch.maximum(largest, scores.amax(-1))
        fade = exponential(largest - peak)
        weights = exponential(scores - peak[..., None])
        lanes = torch.zeros(heads, count, LANES)
        for part in weights.split(LANES, dim=-1):
            lanes = lanes + nn.functional.pad(part, (0, LANES - part.shape[-1]))
        total = total * fade + join_lanes(lanes)
        values = values * fade[..., None]
        for index in range(keys.shape[1]):
            values = fma(value[:, None, start + index], weights[..., index, None], values)
        largest = peak
    return (values / total[..., None]).transpose(0, 1).reshape(count, -1)


class ExactTwin:
    """A Llama-like model in W4A16: `weights` by module name below a block, `norms` by parameter name."""

    def __init__(self, config: ModelConfig, weights: dict[str, Quantized], norms: dict[str, Tensor]) -> None:
        self.config, self.weights, self.norms = config, weights, norms

    def hidden(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Embeddings [T, D] of one sequence: hidden states [T, D] after the last norm."""
        for layer in range(self.config.layer_count):
            x = self._block(x, f"model.layers.{layer}.", rotation)
        return norm(x, self.norms["model.norm.weight"], self.config.norm_epsilon)

    def _block(self, x: Tensor, prefix: str, rotation: tuple[Tensor, Tensor]) -> Tensor:
        config, size = self.config, self.config.head_dim
        normed = norm(x, self.norms[f"{prefix}input_layernorm.weight"], config.norm_epsilon)
        query, key, value = (
            linear(normed, self.weights[f"{prefix}self_attn.{name}_proj"]).view(len(x), -1, size) for name in "qkv"
        )
        cosine, sine = (table[: len(x)] for table in rotation)
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        group = config.heads // config.kv_heads
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        attended = attend(query, key, value, config.query_scale)
        x = linear(attended, self.weights[f"{prefix}self_attn.o_proj"]) + x
        normed = norm(x, self.norms[f"{prefix}post_attention_layernorm.weight"], config.norm_epsilon)
        gate, up = (linear(normed, self.weights[f"{prefix}mlp.{name}_proj"]) for name in ("gate", "up"))
        gate = gate * (1.0 / (1.0 + exponential(0.0 - gate))) * up
        return linear(gate, self.weights[f"{prefix}mlp.down_proj"]) + x


def twin_hidden(model: Model, ids: Tensor) -> Tensor:
    """What `model` makes of ids [1, T], computed from the weights in its folder: hidden states [1, T, D]."""
    network, checkpoint = model.network, open_checkpoint(model.folder)
    assert isinstance(network, NativeDecoder)
    weights = {}
    for module, scheme in stored_schemes(checkpoint).items():
        names = [name for name in checkpoint.tensors if name.startswith(f"{module}.")]
        parts = {name.removeprefix(f"{module}."): checkpoint.read(name) for name in names}
        weights[module] = format_named(scheme.format).unpack(parts, scheme.grid)
    norms = {name: checkpoint.read(name).float() for name in checkpoint.tensors if "norm" in name}
    embedded = network.engine.embed(network.head.table.layout, ids.flatten())
    rotation = network.new_cache(1, ids.shape[1]).rotations[network.config.ropes[0]]
    return ExactTwin(network.config, weights, norms).hidden(embedded, rotation)[None]
