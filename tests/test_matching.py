"""Patterns of a recipe: globs, class names, regular expressions, and what happens when they name nothing."""

from __future__ import annotations

import pytest

from compress.errors import InputError
from compress.matching import matches, select

MODULES = {
    "model.embed_tokens": "Embedding",
    "model.layers.0.self_attn.q_proj": "Linear",
    "model.layers.0.mlp.up_proj": "Linear",
    "model.layers.1.mlp.up_proj": "Linear",
    "lm_head": "Linear",
}


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("Linear", 4), ("*", 5), ("model.layers.0.*", 2), ("up_proj", 2), ("*.mlp.*", 2), ("re:layers\\.1\\.", 1)],
)
def test_patterns(pattern: str, count: int) -> None:
    assert sum(matches(pattern, name, kind) for name, kind in MODULES.items()) == count


def test_a_name_without_dots_is_a_last_part_not_a_substring() -> None:
    assert not matches("proj", "model.layers.0.mlp.up_proj", "Linear")
    assert not matches("layers.0", "model.layers.0.mlp.up_proj", "Linear")


def test_select_keeps_order_and_ignores() -> None:
    assert select(MODULES, ("Linear",), ("lm_head", "q_proj"), "stages.0") == list(MODULES)[2:4]


@pytest.mark.parametrize(
    ("targets", "ignore", "words"),
    [
        (("q_porj",), (), r"stages\.0\.targets: 'q_porj' matches no module; did you mean 'q_proj'"),
        (("Linear",), ("re:expert",), r"stages\.0\.ignore: 're:expert' matches no module"),
        (("re:(",), (), r"stages\.0\.targets: 're:\(' is not a regular expression"),
    ],
)
def test_patterns_that_name_nothing_are_errors(targets: tuple[str], ignore: tuple[str], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        select(MODULES, targets, ignore, "stages.0")
    assert caught.value.exit_code == 2
