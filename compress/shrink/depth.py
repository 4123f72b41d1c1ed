"""Depth: whole layers left out, as DistilBERT (arXiv 1910.01108) and ShortGPT (arXiv 2403.03853) do."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from compress.errors import USAGE, InputError
from compress.shrink import BLOCK_INFLUENCE, Cut, Measured, most_important, refuse_growth

NEEDS = frozenset({BLOCK_INFLUENCE})
# DistilBERT's own choice: one layer of two is dropped.
EVERY = 2


class Config(BaseModel):
    """Which layers stay, said in one of three ways; by default `every: 2`.

    keep: their numbers, from 0, ascending. every: of so many layers one is dropped; the kept ones are spread evenly,
    first and last among them. layers: how many; those stay that change the hidden states most (block influence).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    keep: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None = None
    every: int | None = Field(default=None, ge=2)
    layers: int | None = Field(default=None, ge=1)

    @field_validator("keep")
    @classmethod
    def _ascending(cls, keep: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if keep is not None and list(keep) != sorted(set(keep)):
            raise ValueError("name each layer once, in ascending order")
        return keep

    @model_validator(mode="after")
    def _one_way(self) -> Config:
        given = [name for name in ("keep", "every", "layers") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given: keep one of them")
        return self


def needs(settings: Config) -> frozenset[str]:
    """Block influence where a number of layers is asked for: 1 - cosine of a block's input and output, per token."""
    return NEEDS if settings.layers is not None else frozenset()


def reshape(config: dict[str, Any], settings: Config, measured: Measured | None) -> tuple[dict[str, Any], Cut]:
    """The config of the shallower model, its fields per layer cut alike, and the layers it is made of.

    Raises InputError for layers that the model does not have, and for a choice that drops none.
    """
    kept = _kept(config, settings, measured)
    return _shallower(config, kept), Cut(kept, config["head_dim"], {})


def spread(depth: int, every: int) -> tuple[int, ...]:
    """The layers that stay where of every `every` one is dropped: spread evenly from the first to the last.

    Of 12 layers and `every` 2: 0, 2, 4, 7, 9, 11, which are those that DistilBERT starts from. Where only one stays it
    is the first.
    """
    count = depth - depth // every
    steps = max(1, count - 1)
    return tuple((2 * index * (depth - 1) + steps) // (2 * steps) for index in range(count))


def _kept(config: dict[str, Any], settings: Config, measured: Measured | None) -> tuple[int, ...]:
    depth = config["num_hidden_layers"]
    if settings.keep is not None:
        if settings.keep[-1] >= depth:
            raise InputError(
                f"keep: layer {settings.keep[-1]} is beyond the model's {depth}, which count from 0", USAGE
            )
        refuse_growth("keep", len(settings.keep), config, "num_hidden_layers")
        return settings.keep
    if settings.layers is not None:
        refuse_growth("layers", settings.layers, config, "num_hidden_layers")
        return tuple(most_important(None if measured is None else measured[BLOCK_INFLUENCE], settings.layers))
    every = settings.every or EVERY
    if every > depth:
        raise InputError(f"every: one layer of {every} is to be dropped, and the model has {depth}: give less", USAGE)
    return spread(depth, every)


def _shallower(config: dict[str, Any], kept: tuple[int, ...]) -> dict[str, Any]:
    """`config` of the layers `kept` alone."""
    changed: dict[str, Any] = {"num_hidden_layers": len(kept)}
    if config.get("layer_types") is not None:
        changed["layer_types"] = [config["layer_types"][layer] for layer in kept]
    if config.get("max_window_layers") is not None:
        # The number of the first layer with a sliding window: kept layers keep their kind.
        changed["max_window_layers"] = sum(layer < config["max_window_layers"] for layer in kept)
    return {**config, **changed}
