"""Hidden-state losses against loops over positions, and the layer map."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from compress.distill import HIDDEN_STATES
from compress.distill.hidden_states import NEEDS, Config, layer_map, loss, refuse_layers
from compress.errors import USAGE, InputError
from tests.distill.oracle import close

BATCH, LENGTH, WIDTH = 2, 5, 6


def states(layers: int, seed: int) -> list[Tensor]:
    """The embedding's output and that of each of `layers` blocks."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layers + 1, BATCH, LENGTH, WIDTH)
    return list(torch.randn(shape, generator=generator, dtype=torch.float64))


def mask() -> Tensor:
    return torch.tensor([[1.0, 0.5, 0.0, 2.0, 0.0], [1.0, 1.0, 1.0, 0.0, 0.25]])


def distance(a: list[float], b: list[float], kind: str) -> float:
    if kind == "mse":
        return sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a)
    product = sum(x * y for x, y in zip(a, b, strict=True))
    return 1 - product / sqrt(sum(x * x for x in a)) / sqrt(sum(y * y for y in b))


def slow(student: list[Tensor], teacher: list[Tensor], pairs: dict[int, int], kind: str) -> float:
    total = 0.0
    for one, other in pairs.items():
        for row in range(BATCH):
            for place in range(LENGTH):
                ours, theirs = student[one + 1][row, place].tolist(), teacher[other + 1][row, place].tolist()
                total += float(mask()[row, place]) * distance(ours, theirs, kind)
    return total / float(mask().sum()) / len(pairs)


@pytest.mark.parametrize("kind", ["mse", "cosine"])
@pytest.mark.parametrize("layers", [None, {0: 5}, {2: 0, 1: 3}], ids=["even", "one", "two"])
def test_values(kind: str, layers: dict[int, int] | None) -> None:
    settings = Config.model_validate({"kind": kind, "layers": layers})
    student, teacher = states(3, 1), states(6, 2)
    expected = torch.tensor(slow(student, teacher, layers or {0: 1, 1: 3, 2: 5}, kind), dtype=torch.float64)
    assert close(loss(student, teacher, mask(), settings), expected, 1e-12)
    # Stacked states serve too, and half precision is widened before anything is squared.
    assert close(loss(torch.stack(student).unbind(), teacher, mask(), settings), expected, 1e-12)
    rounded = [state.bfloat16() for state in student]
    found = loss(rounded, teacher, mask(), settings)
    exact = loss([state.double() for state in rounded], teacher, mask(), settings)
    assert found.dtype == torch.float32 and close(found, exact, 1e-6)


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_gradients(kind: str) -> None:
    teacher = states(2, 2)
    inputs = [state.requires_grad_() for state in states(2, 1)]
    settings = Config.model_validate({"kind": kind})
    assert torch.autograd.gradcheck(lambda *student: loss(student, teacher, mask(), settings), inputs[1:] + inputs[:1])


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_positions_without_weight_are_not_looked_at(kind: str) -> None:
    settings = Config.model_validate({"kind": kind})
    student, teacher = states(2, 1), states(2, 2)
    expected = loss(student, teacher, mask(), settings)
    for state in (*student, *teacher):
        state[mask() == 0] = torch.nan
    inputs = [state.requires_grad_() for state in student]
    found = loss(inputs, teacher, mask(), settings)
    found.backward()
    assert torch.equal(found, expected)
    gradient = inputs[-1].grad
    assert gradient is not None and bool(gradient.isfinite().all())
    assert bool((gradient[mask() == 0] == 0).all()) and bool((gradient[mask() != 0] != 0).any(-1).all())
    with pytest.raises(InputError, match="no position of this batch has a weight"):
        loss(student, teacher, torch.zeros(BATCH, LENGTH), settings)


def test_vectors_of_zeros_have_an_angle_of_90_degrees() -> None:
    student = [torch.zeros(1, 2, WIDTH).requires_grad_() for _ in range(2)]
    found = loss(student, [torch.ones(1, 2, WIDTH)] * 2, torch.ones(1, 2), Config(kind="cosine"))
    found.backward()
    assert float(found.detach()) == 1.0 and student[1].grad is not None and bool(student[1].grad.isfinite().all())


def test_the_map_is_even_and_ends_with_the_last() -> None:
    assert layer_map(Config(), 6, 12) == {0: 1, 1: 3, 2: 5, 3: 7, 4: 9, 5: 11}
    assert layer_map(Config(), 4, 4) == {0: 0, 1: 1, 2: 2, 3: 3}
    assert layer_map(Config(), 1, 30) == {0: 29}
    assert layer_map(Config(), 3, 7) == {0: 2, 1: 4, 2: 6}
    assert layer_map(Config(layers={1: 2}), 6, 12) == {1: 2}
    for ours in range(1, 20):
        for theirs in range(1, 20):
            found = list(layer_map(Config(), ours, theirs).values())
            assert found == sorted(found) and found[0] >= 0 and found[-1] == theirs - 1
            steps = {b - a for a, b in zip(found, found[1:], strict=False)}
            assert steps <= {theirs // ours, -(-theirs // ours)}


@pytest.mark.parametrize(
    ("layers", "widths", "message"),
    [
        ({3: 1}, (8, 8), r"hidden_states.layers: student layer 3 of a student with 3 layers: give .* from 0 to 2"),
        ({0: 1, 2: 6}, (8, 8), r"hidden_states.layers: teacher layer 6 of a teacher with 6 layers: .* from 0 to 5"),
        (None, (8, 16), r"hidden_states: the student is 8 wide and the teacher 16: .* keep the teacher's"),
    ],
    ids=["student", "teacher", "width"],
)
def test_refusals(layers: dict[int, int] | None, widths: tuple[int, int], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        refuse_layers(Config(layers=layers), 3, 6, *widths)
    assert caught.value.exit_code == USAGE
    if layers is not None:
        with pytest.raises(InputError, match=message):
            loss(states(3, 1), states(6, 2), mask(), Config(layers=layers))


def test_what_fits_is_not_refused() -> None:
    refuse_layers(Config(), 3, 6, 8, 8)
    refuse_layers(Config(layers={2: 5}), 3, 6, 8, 8)
    with pytest.raises(InputError, match="6 wide and the teacher 5"):
        loss(states(3, 1), [state[..., :5] for state in states(6, 2)], mask(), Config())


def test_settings() -> None:
    assert {HIDDEN_STATES} == NEEDS
    assert Config.model_validate({"layers": {"0": 1}}).layers == {0: 1}  # as JSON has it
    refused: list[dict[str, object]] = [{"kind": "l1"}, {"layers": {}}, {"layers": {-1: 0}}, {"temperature": 2}]
    for wrong in [*refused, {"layers": {0: -1}}]:
        with pytest.raises(ValidationError):
            Config.model_validate(wrong)
