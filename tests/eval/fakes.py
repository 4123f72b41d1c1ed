"""Stand-ins for a loaded model and its tokenizer, small enough that a test can compute by hand what they must give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class FakeModel:
    """A bigram model: the logits after token t are row t of `table` [V, V], whatever came before."""

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.config = SimpleNamespace(vocab_size=table.shape[1])
        self.device = torch.device("cpu")
        self.calls: list[tuple[int, int]] = []  # (tokens asked for, length of the cache they continued)
        self.widest = 0  # most rows of logits held at once

    def hidden(self, tokens: Tensor, cache: Any = None) -> Tensor:
        self.calls.append((tokens.shape[1], -1 if cache is None else len(cache)))
        if cache is not None:
            cache.extend(tokens[0].tolist())
        return tokens[..., None].double()

    def logits(self, hidden: Tensor) -> Tensor:
        self.widest = max(self.widest, hidden[..., 0].numel())
        return self.table[hidden[..., 0].long()]

    def new_cache(self, batch: int, capacity: int) -> list[int]:
        return []


class ByteTokenizer:
    """One token per byte. `start`: the id that it puts in front of every text by itself. fast: can tell positions."""

    def __init__(self, start: int | None = None, fast: bool = True) -> None:
        self.bos_token_id = 256
        self.start = start
        self.is_fast = fast

    def __call__(
        self, text: str, add_special_tokens: bool = True, return_offsets_mapping: bool = False, verbose: bool = True
    ) -> dict[str, Any]:
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for position, character in enumerate(text):
            for byte in character.encode():
                ids.append(byte)
                spans.append((position, position + 1))
        if add_special_tokens and self.start is not None:
            ids.insert(0, self.start)
        return {"input_ids": ids, "offset_mapping": spans} if return_offsets_mapping else {"input_ids": ids}
