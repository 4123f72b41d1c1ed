"""The key and value cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compress.runtime.cache import Cache
from compress.runtime.config import read_config
from tests.tiny import TINY

CONFIG = read_config({"model_type": "llama", **TINY}, Path("config.json"))


def test_extend_returns_everything_so_far() -> None:
    cache = Cache(CONFIG, 3, 10, torch.empty(0, dtype=torch.bfloat16))
    assert cache.capacity == 10 and cache.length == 0
    key, value = torch.randn(2, 3, 2, 7, 16).to(torch.bfloat16)
    for start, stop in ((0, 4), (4, 5), (5, 7)):
        for layer, sign in ((0, 1), (1, -1)):
            keys, values = cache.extend(layer, sign * key[:, :, start:stop], sign * value[:, :, start:stop])
            assert torch.equal(keys, sign * key[:, :, :stop]) and torch.equal(values, sign * value[:, :, :stop])
        cache.advance(stop - start)
    assert cache.length == 7


def test_beyond_the_capacity() -> None:
    cache = Cache(CONFIG, 1, 4, torch.empty(0))
    with pytest.raises(ValueError, match="holds 4 tokens and 5 were given"):
        cache.extend(0, torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5, 16))
