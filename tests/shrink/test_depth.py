"""Which layers stay, and what becomes of the fields that a config has per layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compress.document import Place, validate
from compress.errors import InputError
from compress.shrink import depth

CONFIG = {"num_hidden_layers": 6, "head_dim": 16, "vocab_size": 9}


@pytest.mark.parametrize(
    ("layers", "every", "kept"),
    [
        (12, 2, (0, 2, 4, 7, 9, 11)),  # as in DistilBERT's own script
        (6, 2, (0, 3, 5)),
        (5, 2, (0, 2, 4)),
        (2, 2, (0,)),
        (6, 3, (0, 2, 3, 5)),
        (30, 30, tuple(layer for layer in range(30) if layer != 14)),
    ],
)
def test_dropped_layers_are_spread(layers: int, every: int, kept: tuple[int, ...]) -> None:
    config, cut = depth.reshape(CONFIG | {"num_hidden_layers": layers}, depth.Config(every=every), None)
    assert cut.layers == kept and config["num_hidden_layers"] == len(kept) and cut.units == {}


@pytest.mark.parametrize("layers", range(3, 40))
@pytest.mark.parametrize("every", [2, 3, 4])
def test_one_of_every_few_is_dropped(layers: int, every: int) -> None:
    if every > layers:
        return
    kept = depth.spread(layers, every)
    assert len(kept) == layers - layers // every
    assert kept[0] == 0 and (kept[-1] == layers - 1)
    gaps = [second - first for first, second in zip(kept, kept[1:], strict=False)]
    assert min(gaps) >= 1 and max(gaps) - min(gaps) <= 1


def test_the_default_drops_every_second_layer() -> None:
    assert depth.reshape(CONFIG, depth.Config(), None)[1].layers == (0, 3, 5)
    assert depth.needs(depth.Config()) == depth.needs(depth.Config(keep=(1,))) == frozenset()


def test_layers_that_change_most_stay() -> None:
    settings = depth.Config(layers=3)
    assert depth.needs(settings) == {"block_influence"} == depth.NEEDS
    influence = torch.tensor([0.9, 0.1, 0.4, 0.05, 0.1, 0.6])
    assert depth.reshape(CONFIG, settings, {"block_influence": influence})[1].layers == (0, 2, 5)
    config, cut = depth.reshape(CONFIG, settings, None)
    assert len(cut.layers) == config["num_hidden_layers"] == 3, "sizes are known before the measurement"
    with pytest.raises(KeyError):
        depth.reshape(CONFIG, settings, {})  # measured, and the measurement is not there: never a stand-in


def test_fields_per_layer_are_cut_alike() -> None:
    kinds = ["full_attention", "sliding_attention"] * 3
    config = CONFIG | {"layer_types": kinds, "max_window_layers": 3}
    cut, _ = depth.reshape(config, depth.Config(keep=(1, 2, 4)), None)
    assert cut == CONFIG | {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "max_window_layers": 2,  # layers 1 and 2 lay below 3
    }
    assert config["layer_types"] == kinds and config["num_hidden_layers"] == 6, "the source's config is left alone"


def test_a_threshold_beyond_the_model_stays_beyond_it() -> None:
    config, _ = depth.reshape(CONFIG | {"max_window_layers": 28}, depth.Config(keep=(1, 4)), None)
    assert config["max_window_layers"] == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": (0, 6)}, "keep: layer 6 is beyond the model's 6, which count from 0"),
        ({"keep": range(6)}, "keep: 6 is what the model has already (num_hidden_layers): give less"),
        ({"layers": 6}, "layers: 6 is what the model has already (num_hidden_layers): give less"),
        ({"layers": 7}, "layers: 7 is more than the model's 6 (num_hidden_layers): give less"),
        ({"every": 7}, "every: one layer of 7 is to be dropped, and the model has 6: give less"),
    ],
)
def test_what_the_model_has_no_layers_for(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        depth.reshape(CONFIG, depth.Config(**settings), None)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": [2, 0]}, "r.yaml: field 'shrink.keep' is [2, 0]: name each layer once, in ascending order"),
        ({"keep": [1, 1]}, "r.yaml: field 'shrink.keep' is [1, 1]: name each layer once, in ascending order"),
        ({"keep": []}, "r.yaml: field 'shrink.keep' is []: give an entry"),
        ({"every": 1}, "r.yaml: field 'shrink.every' is 1: it should be greater than or equal to 2"),
        (
            {"keep": [0], "layers": 2},
            "r.yaml: field 'shrink' is {'keep': [0], 'layers': 2}: keep and layers are given: keep one of them",
        ),
    ],
)
def test_settings_that_contradict_themselves(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        validate(depth.Config, settings, Place("r.yaml", "shrink"))
    assert str(caught.value) == message
