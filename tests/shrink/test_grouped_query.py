"""Key and value heads are pooled with their neighbours, as a loop over heads and rows does it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.errors import InputError
from compress.shrink import KEY_VALUE, grouped_query

CONFIG = {"num_hidden_layers": 3, "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4}


def pooled(weight: Tensor, heads: int, kept: int) -> Tensor:
    """Section 2.1 of the paper: head by head, row by row."""
    size, group = len(weight) // heads, heads // kept
    rows = []
    for head in range(kept):
        for row in range(size):
            total = torch.zeros_like(weight[0])
            for member in range(group):
                total = total + weight[(head * group + member) * size + row]
            rows.append(total / group)
    return torch.stack(rows)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_heads_are_mean_pooled(kept: int) -> None:
    config, cut = grouped_query.reshape(CONFIG, grouped_query.Config(kv_heads=kept), None)
    assert config == CONFIG | {"num_key_value_heads": kept}
    assert cut.layers == (0, 1, 2) and set(cut.units) == {KEY_VALUE}
    for role, shape in (("k_proj.weight", (24, 9)), ("v_proj.weight", (24, 9)), ("k_proj.bias", (24,))):
        source = torch.randn(shape, generator=torch.Generator().manual_seed(kept))
        found = cut.tensor(2, f"self_attn.{role}", source)
        assert torch.allclose(found, pooled(source, 6, kept), atol=1e-6)
        assert len(found) == kept * 4
    untouched = torch.ones(48, 9)
    assert cut.tensor(0, "self_attn.q_proj.weight", untouched) is untouched


def test_nothing_is_measured_and_the_default_is_one_head() -> None:
    assert grouped_query.needs(grouped_query.Config()) == frozenset() == grouped_query.NEEDS
    assert grouped_query.Config().kv_heads == 1


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (4, "kv_heads: 4 does not divide the model's 6 key-value heads: give 1, 2, 3"),
        (6, "kv_heads: 6 is what the model has already (num_key_value_heads): give less"),
        (8, "kv_heads: 8 is more than the model's 6 (num_key_value_heads): give less"),
    ],
)
def test_numbers_that_do_not_divide(kept: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        grouped_query.reshape(CONFIG, grouped_query.Config(kv_heads=kept), None)
    assert str(caught.value) == message
