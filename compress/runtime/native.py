"""The decoder through the CPU library: a whole forward pass is one call, and weights stay packed.

`Decoder` says what is computed; this says it again in the terms of the C++ kernels, and parity between the two is
tested for every family.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.architecture import CACHE_BYTES, kv_bytes_per_token
from compress.kernels.cpu.kernel import CpuKernel, Prepared
from compress.kernels.cpu.library import BlockLayout, LinearLayout
from compress.runtime.assign import PackedLinear
from compress.runtime.config import Rope
from compress.runtime.decoder import Block, Decoder, RMSNorm
from compress.runtime.panel_cache import CACHE_TYPES, PanelCache

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}
LARGEST_HEAD = 256


def refuses(decoder: Decoder) -> str | None:
    """The reason why the library cannot run `decoder`, whose weights have been assigned, or None."""
    head_dim = decoder.config.head_dim
    if head_dim > LARGEST_HEAD or head_dim % 2:
        return f"heads of {head_dim} channels (even numbers up to {LARGEST_HEAD} are native)"
    for name, module in decoder.named_modules():
        if isinstance(module, PackedLinear) and not isinstance(module.kernel, CpuKernel):
            return f"{name} is multiplied by the kernel {module.kernel.NAME!r}"
    return None


@dataclass(frozen=True)
class Head:
    """The embedding table and the output layer, which may be one and the same weight."""

    table: Prepared
    output: Prepared


class NativeDecoder:
    """What `Decoder` computes, in float32, by the kernels of `kernel`."""

    def __init__(self, decoder: Decoder, kernel: CpuKernel, kv_cache: str) -> None:
        """Every weight of `decoder`, which has been assigned, moves into panels; those packed already stay."""
        self.config = decoder.config
        self.engine = kernel.engine
        self.kv_cache = kv_cache
        self.head = _pack_head(decoder, kernel)
        pack_linears(decoder, kernel)
        # What the structures below point to stays alive with the modules and this list.
        self.decoder = decoder
        self.tensors: list[Tensor] = []
        self.rotations: dict[Rope, tuple[Tensor, Tensor]] = {}
        self.norm = self._norm(decoder.model.norm)
        self.blocks = (BlockLayout * self.config.layer_count)(
            *(self._block(block, index) for index, block in enumerate(decoder.model.layers))  # type: ignore[arg-type]
        )

    def hidden(self, tokens: Tensor, cache: PanelCache | None = None) -> Tensor:
        """tokens [B, T], which follow those in `cache`: hidden states [B, T, D] after the last norm."""
        batch, count = tokens.shape
        cache = cache or self.new_cache(batch, count)
        if batch != cache.batch:
            raise ValueError(f"the cache was made for {cache.batch} sequences and {batch} were given")
        if cache.length + count > cache.capacity:
            raise ValueError(f"the cache holds {cache.capacity} tokens and {cache.length + count} were given")
        x = self.engine.embed(self.head.table.layout, tokens.flatten())
        if self.config.embedding_scale != 1.0:
            x *= self.config.embedding_scale
        if cache.rotations is not self.rotations:
            self._turn_by(cache.rotations)
        sizes = (self.config.heads, self.config.kv_heads, self.config.head_dim)
        self.engine.blocks(self.blocks, sizes, cache.layout(), count, x)
        cache.length += count
        return self.engine.norm(x, self.norm, self.config.norm_epsilon).view(batch, count, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D]: next-token logits [..., V]."""
        logits = self.engine.multiply(self.head.output.layout, hidden.reshape(-1, hidden.shape[-1]))
        logits = logits.view(*hidden.shape[:-1], -1)
        cap = self.config.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _turn_by(self, rotations: dict[Rope, tuple[Tensor, Tensor]]) -> None:
        """Point every block to the tables of a cache."""
        for block, rope in zip(self.blocks, self.config.ropes, strict=True):
            block.cosine, block.sine = (table.data_ptr() for table in rotations[rope])
        self.rotations = rotations

    def new_cache(self, batch: int, capacity: int) -> PanelCache:
        return PanelCache(self.config, batch, capacity, CACHE_TYPES[self.kv_cache])

    def kv_bytes_per_token(self) -> int:
        """Bytes of key and value cache per token of a sequence."""
        return kv_bytes_per_token(self.config, *CACHE_BYTES[self.kv_cache])

    def _block(self, block: Block, index: int) -> BlockLayout:
        attention, mlp, config = block.self_attn, block.mlp, self.config
        after = mlp_before = None
        if config.post_norms:
            after, mlp_before = block.post_attention_layernorm, block.pre_feedforward_layernorm
        layout = BlockLayout(
            query=self._linear(attention.q_proj),
            key=self._linear(attention.k_proj),
            value=self._linear(attention.v_proj),
            output=self._linear(attention.o_proj),
            gate=self._linear(mlp.gate_proj),
            up=self._linear(mlp.up_proj),
            down=self._linear(mlp.down_proj),
            window=config.windows[index] or 0,
            epsilon=config.norm_epsilon,
            query_scale=config.query_scale,
            softcap=config.attention_softcap or 0.0,
            activation=ACTIVATIONS[config.activation],
        )
        layout.input_norm = self._norm(block.input_layernorm).data_ptr()
        layout.mlp_norm = self._norm(mlp_before or block.post_attention_layernorm).data_ptr()
        if after is not None:
            layout.attention_norm_after = self._norm(after).data_ptr()
            layout.mlp_norm_after = self._norm(block.post_feedforward_layernorm).data_ptr()
        if config.head_norm:
            layout.query_norm = self._norm(attention.q_norm).data_ptr()
            layout.key_norm = self._norm(attention.k_norm).data_ptr()
        return layout

    def _linear(self, linear: nn.Module) -> LinearLayout:
        assert isinstance(linear, PackedLinear) and isinstance(linear.prepared, Prepared)
        layout = LinearLayout.from_buffer_copy(linear.prepared.layout)
        if linear.bias is not None:
            layout.bias = self._keep(linear.bias.float().contiguous()).data_ptr()
        return layout

    def _norm(self, norm: RMSNorm) -> Tensor:
        return self._keep((norm.weight.float() + norm.offset).contiguous())

    def _keep(self, tensor: Tensor) -> Tensor:
        self.tensors.append(tensor)
        return tensor


def pack_linears(network: nn.Module, kernel: CpuKernel) -> None:
    """Swap every linear layer of `network` that is not packed yet for one whose weight lies in panels."""
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.Linear):
            network.set_submodule(name, PackedLinear(kernel, kernel.prepare_dense(module.weight), module.bias))


def _pack_head(decoder: Decoder, kernel: CpuKernel) -> Head:
    """Pack the embedding table, and the output layer with it where they share their weight."""
    embedding, output = decoder.model.embed_tokens, decoder.lm_head
    table = kernel.prepare_dense(embedding.weight)
    if isinstance(output, nn.Linear):
        shared = output.weight.data_ptr() == embedding.weight.data_ptr()
        prepared = table if shared else kernel.prepare_dense(output.weight)
        decoder.lm_head = PackedLinear(kernel, prepared, output.bias)  # type: ignore[assignment]
    decoder.model.embed_tokens = PackedEmbedding(table)  # type: ignore[assignment]
    packed = decoder.lm_head
    assert isinstance(packed, PackedLinear) and isinstance(packed.prepared, Prepared)
    return Head(table, packed.prepared)


class PackedEmbedding(nn.Module):
    """An embedding table in panels, which NativeDecoder reads."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__()
        self.prepared = prepared
