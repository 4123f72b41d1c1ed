"""transformers as a peer of examples/side_by_side_speed.py."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import transformers
from serving import serve
from transformers import AutoModelForCausalLM, DynamicCache


class Transformers:
    """A model folder in transformers, computed in `dtype`, with its default attention and cache."""

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.about = {
            "program": "transformers",
            "version": transformers.__version__,
            "weights": dtype,
            "threads": torch.get_num_threads(),
        }

    def prepare(self, batch: int, capacity: int) -> None:
        self.cache = DynamicCache(config=self.model.config)
        self.batch = batch

    def prefill(self, prompt: int) -> None:
        self._next_logits(torch.arange(prompt).remainder(97).expand(self.batch, -1))

    def step(self) -> None:
        self._next_logits(torch.zeros(self.batch, 1, dtype=torch.int64))

    @torch.inference_mode()
    def _next_logits(self, tokens: Any) -> None:
        self.model(input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    serve(Transformers(arguments.model, arguments.dtype, arguments.threads))
