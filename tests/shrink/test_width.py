"""Which channels and heads stay, against a loop that ranks them."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from compress.errors import InputError
from compress.shrink import CHANNEL, KEY_VALUE, QUERY, width

CONFIG = {
    "num_hidden_layers": 2,
    "intermediate_size": 10,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
}
MEASURED = {
    name: torch.rand(2, 10 if name.startswith("channel") else 6, generator=torch.Generator().manual_seed(seed))
    for seed, name in enumerate(sorted(width.NEEDS))
}


@pytest.mark.parametrize("importance", ["l2", "mean"])
def test_each_layer_keeps_its_most_active_channels(importance: Literal["l2", "mean"]) -> None:
    settings = width.Config(intermediate_size=4, importance=importance)
    name = f"channel_{importance}"
    assert width.needs(settings) == {name}
    config, cut = width.reshape(CONFIG, settings, {name: MEASURED[name]})
    assert config == CONFIG | {"intermediate_size": 4} and cut.layers == (0, 1)
    assert set(cut.units) == {CHANNEL}
    for layer, found in enumerate(cut.units[CHANNEL]):
        ranked = sorted(range(10), key=lambda channel: -float(MEASURED[name][layer, channel]))
        assert found.flatten().tolist() == sorted(ranked[:4])


@pytest.mark.parametrize("importance", ["l2", "mean"])
def test_whole_groups_of_heads_stay(importance: Literal["l2", "mean"]) -> None:
    settings = width.Config(heads=4, importance=importance)
    name = f"head_{importance}"
    assert width.needs(settings) == {name}
    config, cut = width.reshape(CONFIG, settings, {name: MEASURED[name]})
    assert config == CONFIG | {"num_attention_heads": 4, "num_key_value_heads": 2}
    for layer in range(2):
        sums = [float(MEASURED[name][layer, 2 * group] + MEASURED[name][layer, 2 * group + 1]) for group in range(3)]
        groups = sorted(sorted(range(3), key=lambda group: -sums[group])[:2])
        assert cut.units[KEY_VALUE][layer].flatten().tolist() == groups
        assert cut.units[QUERY][layer].flatten().tolist() == [2 * group + head for group in groups for head in (0, 1)]


def test_both_at_once() -> None:
    settings = width.Config(intermediate_size=2, heads=2)
    assert width.needs(settings) == {"channel_l2", "head_l2"}
    config, cut = width.reshape(CONFIG, settings, None)
    sizes = {
        name: config[name] for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    }
    assert list(sizes.values()) == [2, 2, 1, 8]
    assert {kind: [len(kept) for kept in rows] for kind, rows in cut.units.items()} == {
        CHANNEL: [2, 2],
        KEY_VALUE: [1, 1],
        QUERY: [2, 2],
    }
    with pytest.raises(KeyError):
        width.reshape(CONFIG, settings, {"channel_l2": MEASURED["channel_l2"]})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "intermediate_size, heads: neither is given: give one of them"),
        ({"intermediate_size": 12}, "intermediate_size: 12 is more than the model's 10 (intermediate_size): give less"),
        (
            {"intermediate_size": 10},
            "intermediate_size: 10 is what the model has already (intermediate_size): give less",
        ),
        ({"heads": 7}, "heads: 7 is more than the model's 6 (num_attention_heads): give less"),
        (
            {"heads": 3},
            "heads: 3 would split a group: 2 query heads share each key-value head: give a multiple of 2",
        ),
    ],
)
def test_sizes_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        width.reshape(CONFIG, width.Config(**settings), MEASURED)
    assert str(caught.value) == message
