"""One tiny model per family and per switch that changes what a decoder computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from tests.tiny import write_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
GEMMA = {"sliding_window": 7, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}


class Case(NamedTuple):
    model_type: str
    changes: dict[str, Any]


# Windows of 7 are shorter than the texts that the tests run.
CASES = {
    "llama": Case("llama", {}),
    "llama, llama3 rope, biases, tied": Case(
        "llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "llama, linear rope": Case("llama", {"rope_parameters": LINEAR}),
    "mistral": Case("mistral", {"sliding_window": 7}),
    "mistral without window": Case("mistral", {"sliding_window": None}),
    "qwen2": Case("qwen2", {}),
    "qwen2 with windows": Case("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": Case("qwen3", {}),
    "gemma": Case("gemma", {"tie_word_embeddings": True}),
    "gemma2": Case(
        "gemma2", GEMMA | {"num_hidden_layers": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    ),
    "gemma3": Case("gemma3_text", GEMMA | {"num_hidden_layers": 7}),
}


def write_case(folder: Path, case: Case) -> Path:
    """The model of `case` in float32, its norms and biases random too, so that none is an identity."""
    write_model(folder, case.model_type, torch.float32, **case.changes)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return folder
