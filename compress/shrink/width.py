"""Width: MLP channels and attention heads cut by the size of their activations (Minitron, arXiv 2407.14679)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from compress.errors import USAGE, InputError
from compress.shrink import CHANNEL, KEY_VALUE, QUERY, Cut, Measured, most_important, refuse_growth

NEEDS = frozenset({"channel_l2", "channel_mean", "head_l2", "head_mean"})


class Config(BaseModel):
    """What is left of each layer; each layer chooses for itself which.

    intermediate_size: channels of its MLP, a multiple of 64 for the sake of kernels. heads: query heads; key and value
    heads go with the whole groups of query heads that read them. importance, over calibration tokens: `l2`, the root
    of the mean square of a channel's activation or of the norm of a head's output; `mean`, the mean of their size.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    intermediate_size: int | None = Field(default=None, ge=1)
    heads: int | None = Field(default=None, ge=1)
    importance: Literal["l2", "mean"] = "l2"


def needs(settings: Config) -> frozenset[str]:
    """The importances of what is to be cut."""
    wanted = {"channel": settings.intermediate_size, "head": settings.heads}
    return frozenset(f"{name}_{settings.importance}" for name, size in wanted.items() if size is not None)


def reshape(config: dict[str, Any], settings: Config, measured: Measured | None) -> tuple[dict[str, Any], Cut]:
    """The config of the narrower model, whose heads keep their width, and the channels and heads that it keeps.

    Raises InputError for sizes that are not below the model's and for heads that would split a key-value group.
    """
    if settings.intermediate_size is None and settings.heads is None:
        raise InputError("intermediate_size, heads: neither is given: give one of them", USAGE)
    depth = config["num_hidden_layers"]
    changed: dict[str, Any] = {}
    units: dict[str, tuple[Tensor, ...]] = {}
    if settings.intermediate_size is not None:
        refuse_growth("intermediate_size", settings.intermediate_size, config, "intermediate_size")
        changed["intermediate_size"] = settings.intermediate_size
        scores = _scores(measured, f"channel_{settings.importance}", depth)
        units[CHANNEL] = tuple(_column(most_important(row, settings.intermediate_size)) for row in scores)
    if settings.heads is not None:
        kv_heads = _key_value_heads(settings.heads, config)
        changed |= {"num_attention_heads": settings.heads, "num_key_value_heads": kv_heads}
        scores = _scores(measured, f"head_{settings.importance}", depth)
        ratio = settings.heads // kv_heads
        groups = [
            most_important(None if row is None else row.unflatten(0, (-1, ratio)).sum(1), kv_heads) for row in scores
        ]
        units[KEY_VALUE] = tuple(_column(kept) for kept in groups)
        units[QUERY] = tuple(
            _column([group * ratio + head for group in kept for head in range(ratio)]) for kept in groups
        )
    return {**config, **changed}, Cut(tuple(range(depth)), config["head_dim"], units)


def _key_value_heads(heads: int, config: dict[str, Any]) -> int:
    """Key and value heads of `heads` query heads, as many query heads to each as before."""
    refuse_growth("heads", heads, config, "num_attention_heads")
    ratio = config["num_attention_heads"] // config["num_key_value_heads"]
    if heads % ratio:
        raise InputError(
            f"heads: {heads} would split a group: {ratio} query heads share each key-value head: give a multiple of "
            f"{ratio}",
            USAGE,
        )
    return heads // ratio


def _scores(measured: Measured | None, name: str, depth: int) -> list[Tensor] | list[None]:
    """The importances [units] of each layer; None for each while they are unknown."""
    return [None] * depth if measured is None else list(measured[name])


def _column(kept: list[int]) -> Tensor:
    return torch.tensor(kept).unsqueeze(1)
