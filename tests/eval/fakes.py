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


class Clock:
    """A clock that stands still until somebody moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        return self.now


class TimedModel:
    """Computes nothing, and takes `token` seconds of `clock` per token of a prompt, or `step` for one token each.

    log: takes a line per call: name, batch, a space, tokens.
    """

    def __init__(self, clock: Clock, token: float, step: float, log: list[str] | None = None, name: str = "") -> None:
        self.clock, self.token, self.step, self.name = clock, token, step, name
        self.log = [] if log is None else log
        self.config = SimpleNamespace(vocab_size=50)
        self.device = torch.device("cpu")
        self.calls: list[tuple[int, int]] = []
        self.caches: list[tuple[int, int]] = []

    def hidden(self, tokens: Tensor, cache: Any) -> Tensor:
        batch, count = tokens.shape
        assert int(tokens.max()) < self.config.vocab_size
        self.clock.now += self.step if count == 1 else self.token * batch * count
        self.log.append(f"{self.name}{batch} {count}")
        self.calls.append((count, len(cache)))
        cache.extend([0] * count)
        return torch.zeros(batch, count, 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def new_cache(self, batch: int, capacity: int) -> list[int]:
        self.caches.append((batch, capacity))
        return []
