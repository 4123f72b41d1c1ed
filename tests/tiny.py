"""Tiny random models on disk, as any Hugging Face folder is: what most tests run the real code on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed

VOCABULARY = 288  # 256 bytes, three special tokens, and rows to spare, as padded embeddings have
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,  # wide enough that attention and activations are not flat
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "tie_word_embeddings": False,
}
WORDS = ("the", "of", "a", "press", "makes", "models", "small", "and", "fast", "but", "what", "did", "it", "cost")
CHAT = "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"


def write_model(
    folder: Path, model_type: str = "llama", dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changes: Any
) -> Path:
    """Write a random model of `model_type` with a byte-level tokenizer to `folder`, and return the folder.

    changes: entries of the config. The same arguments give the same bytes.
    """
    set_seed(seed)
    config = AutoConfig.for_model(model_type, **(TINY | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, ids 0 to 255, then <bos>, <eos> and <pad>; with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in ("<bos>", "<eos>", "<pad>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", chat_template=CHAT
    )


def write_text(file: Path, characters: int = 20_000) -> Path:
    """Write prose-like text of `characters` ASCII characters to `file`: words of an uneven, fixed distribution."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.multinomial(1 / torch.arange(1, len(WORDS) + 1), characters, True, generator=generator).tolist()
    text = " ".join(WORDS[i] + ("." if n % 13 == 12 else "") for n, i in enumerate(picks))
    file.write_text(text[:characters], encoding="utf-8")
    return file
