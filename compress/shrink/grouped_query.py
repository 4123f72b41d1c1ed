"""Grouped-query attention out of more key and value heads, mean-pooled (arXiv 2305.13245, section 2.1)."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from compress.errors import USAGE, InputError
from compress.shrink import KEY_VALUE, Cut, Measured, refuse_growth

NEEDS: frozenset[str] = frozenset()


class Config(BaseModel):
    """kv_heads: key and value heads that are left; 1 is multi-query attention. Neighbours are averaged."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kv_heads: int = Field(default=1, ge=1)


def needs(settings: Config) -> frozenset[str]:
    """Nothing: all heads go into the means."""
    return NEEDS


def reshape(config: dict[str, Any], settings: Config, measured: Measured | None) -> tuple[dict[str, Any], Cut]:
    """The config with fewer key and value heads, and which of them each is the mean of.

    Norms of queries and keys act on one head's width and stay. Raises InputError for a number of heads that is not
    below the model's or does not divide it.
    """
    before, depth = config["num_key_value_heads"], config["num_hidden_layers"]
    refuse_growth("kv_heads", settings.kv_heads, config, "num_key_value_heads")
    if before % settings.kv_heads:
        choices = ", ".join(str(count) for count in range(1, before) if before % count == 0)
        raise InputError(
            f"kv_heads: {settings.kv_heads} does not divide the model's {before} key-value heads: give {choices}", USAGE
        )
    groups = torch.arange(before).view(settings.kv_heads, -1)
    cut = Cut(tuple(range(depth)), config["head_dim"], {KEY_VALUE: (groups,) * depth})
    return {**config, "num_key_value_heads": settings.kv_heads}, cut
