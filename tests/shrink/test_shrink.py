"""What cuts do to tensors, against loops, and cuts behind one another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.errors import InputError
from compress.shrink import CHANNEL, KEY_VALUE, QUERY, Cut, cut_shape, cut_tensor, most_important, refuse_growth, trail

HEAD = 4
GENERATOR = torch.Generator().manual_seed(0)


def units(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


def test_members_are_averaged_head_by_head_as_a_loop_does() -> None:
    weight = torch.randn(6 * HEAD, 10, generator=GENERATOR)
    cut = Cut((0,), HEAD, {KEY_VALUE: (units([0, 3], [5, 1]),)})
    found = cut.tensor(0, "self_attn.k_proj.weight", weight)
    expected = torch.empty(2 * HEAD, 10)
    for head, members in enumerate(([0, 3], [5, 1])):
        for row in range(HEAD):
            for column in range(10):
                values = [float(weight[member * HEAD + row, column]) for member in members]
                expected[head * HEAD + row, column] = sum(values) / len(values)
    assert torch.allclose(found, expected, atol=1e-6)
    assert found.shape == cut.shape(0, "self_attn.k_proj.weight", (6 * HEAD, 10))


def test_means_are_rounded_once_to_what_the_source_is_stored_in() -> None:
    """256 + 1 has no bfloat16: a sum that is rounded on the way stays at 256."""
    bias = torch.tensor([256.0, 1.0], dtype=torch.bfloat16)
    found = Cut((0,), 1, {KEY_VALUE: (units([0, 1, 1]),)}).tensor(0, "self_attn.v_proj.bias", bias)
    assert found.dtype == torch.bfloat16
    assert float(found) == float(torch.tensor(258 / 3).bfloat16()) != float(torch.tensor(256 / 3).bfloat16())


@pytest.mark.parametrize(
    ("role", "kind", "axis"),
    [
        ("self_attn.q_proj.weight", QUERY, 0),
        ("self_attn.q_proj.bias", QUERY, 0),
        ("self_attn.k_proj.weight", KEY_VALUE, 0),
        ("self_attn.v_proj.bias", KEY_VALUE, 0),
        ("self_attn.o_proj.weight", QUERY, 1),
        ("mlp.gate_proj.weight", CHANNEL, 0),
        ("mlp.up_proj.bias", CHANNEL, 0),
        ("mlp.down_proj.weight", CHANNEL, 1),
    ],
)
def test_kept_units_are_those_rows_and_columns(role: str, kind: str, axis: int) -> None:
    size = 1 if kind == CHANNEL else HEAD
    shape = [5, 5]
    shape[axis] = 6 * size
    source = torch.randn(shape[: 1 if role.endswith("bias") else 2], generator=GENERATOR)
    found = Cut((0,), HEAD, {kind: (units([1], [4]),)}).tensor(0, role, source)
    wanted = [unit * size + row for unit in (1, 4) for row in range(size)]
    expected = source[wanted] if axis == 0 else source[:, wanted]
    assert torch.equal(found, expected) and found.is_contiguous()


@pytest.mark.parametrize(
    "role", ["self_attn.o_proj.bias", "self_attn.q_norm.weight", "input_layernorm.weight", "mlp.down_proj.bias"]
)
def test_what_no_axis_counts_stays(role: str) -> None:
    source = torch.randn(2 * HEAD, generator=GENERATOR)
    everything = {kind: (units([1]),) for kind in (QUERY, KEY_VALUE, CHANNEL)}
    assert Cut((0,), HEAD, everything).tensor(0, role, source) is source


def test_cuts_follow_one_another() -> None:
    """Layers 1 and 3 of four, then channels of each, then the second of those: channel 5 of layer 3."""
    depth = Cut((1, 3), HEAD, {})
    width = Cut((0, 1), HEAD, {CHANNEL: (units([0], [2]), units([4], [5]))})
    again = Cut((1,), HEAD, {CHANNEL: (units([1]),)})
    origin, steps = trail((depth, width, again), 0)
    assert origin == 3
    weight = torch.randn(6, 7, generator=GENERATOR)
    assert torch.equal(cut_tensor(steps, "mlp.up_proj.weight", weight), weight[[5]])
    assert cut_shape(steps, "mlp.up_proj.weight", (6, 7)) == (1, 7)


def test_importances_move_with_the_layers_and_units() -> None:
    channel, influence = torch.arange(12.0).view(3, 4), torch.tensor([0.1, 0.2, 0.3])
    cut = Cut((0, 2), HEAD, {CHANNEL: (units([1], [3]), units([0], [2]))})
    carried = cut.carry({"channel_l2": channel, "block_influence": influence})
    assert carried["channel_l2"].tolist() == [[1.0, 3.0], [8.0, 10.0]]
    assert torch.equal(carried["block_influence"], influence[[0, 2]])


def test_the_most_important_are_in_their_order_and_ties_go_to_the_first() -> None:
    assert most_important(torch.tensor([1.0, 5.0, 5.0, 7.0]), 2) == [1, 3]
    assert most_important(torch.zeros(4), 3) == [0, 1, 2]
    assert most_important(None, 2) == [0, 1]


def test_growth_is_refused() -> None:
    for wanted, message in (
        (8, "kv_heads: 8 is what the model has already (num_key_value_heads): give less"),
        (9, "kv_heads: 9 is more than the model's 8 (num_key_value_heads): give less"),
    ):
        with pytest.raises(InputError) as caught:
            refuse_growth("kv_heads", wanted, {"num_key_value_heads": 8}, "num_key_value_heads")
        assert str(caught.value) == message and caught.value.exit_code == 2
