"""`python -m tests.large DIR [LAYERS] [WIDTH]`: write a random Llama in bfloat16, shard by shard, for measuring memory.

The default is the shape of a 1.1B model: 22 layers, width 2048, feed-forward 5632, 32 heads, 4 key-value heads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.tiny import VOCABULARY, byte_tokenizer

WIDTH = 2048


def write_large(folder: Path, layers: int = 22, width: int = WIDTH, vocabulary: int = 32_000) -> Path:
    """Write the model without ever holding more than one block of it."""
    folder.mkdir(parents=True)
    feed_forward, heads, head_size = width * 11 // 4, width // 64, 64
    kv_width = max(1, heads // 8) * head_size
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": max(vocabulary, VOCABULARY),
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_width // head_size,
        "head_dim": head_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    byte_tokenizer().save_pretrained(folder)
    square = {
        "q_proj": (width, width),
        "k_proj": (kv_width, width),
        "v_proj": (kv_width, width),
        "o_proj": (width, width),
    }
    mlp = {"gate_proj": (feed_forward, width), "up_proj": (feed_forward, width), "down_proj": (width, feed_forward)}
    shapes = {f"self_attn.{name}": shape for name, shape in square.items()}
    shapes |= {f"mlp.{name}": shape for name, shape in mlp.items()}
    weight_map: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)

    def save(number: int, tensors: dict[str, torch.Tensor]) -> None:
        file = f"model-{number:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).mul_(0.02).to(torch.bfloat16)

    norm = torch.ones(width, dtype=torch.bfloat16)
    outside = {"model.embed_tokens.weight": normal(config["vocab_size"], width)}  # type: ignore[arg-type]
    save(1, outside | {"lm_head.weight": normal(config["vocab_size"], width), "model.norm.weight": norm})  # type: ignore[arg-type]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        block = {f"{prefix}{name}.weight": normal(*shape) for name, shape in shapes.items()}
        block |= {f"{prefix}{name}.weight": norm.clone() for name in ("input_layernorm", "post_attention_layernorm")}
        save(layer + 2, block)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


if __name__ == "__main__":
    write_large(Path(sys.argv[1]), *map(int, sys.argv[2:]))
