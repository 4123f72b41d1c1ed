"""Block output loss against a loop over positions."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from compress.distill.block_output import NEEDS, Config, loss


def test_loss_is_the_squared_error_over_the_variance_of_each_position_and_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 2, 3, 5, generator=generator, dtype=torch.float64)
    errors, variances = [], []
    for ours, theirs in zip(student.reshape(-1, 5).tolist(), teacher.reshape(-1, 5).tolist(), strict=True):
        mean = sum(theirs) / 5
        variances.append(sum((value - mean) ** 2 for value in theirs) / 5)
        errors.append(sum((one - other) ** 2 for one, other in zip(ours, theirs, strict=True)) / 5)
    common = sum(variances) / 6
    expected = [error / own / 2 + error / common / 2 for error, own in zip(errors, variances, strict=True)]
    assert loss(student, teacher).tolist() == pytest.approx(expected, rel=1e-12)


def test_neither_a_long_vector_nor_the_many_others_are_given_up() -> None:
    """The share of the loss that a position's, or all others', utter loss has: between a third and all of it."""
    teacher = torch.randn(1, 512, 64, generator=torch.Generator().manual_seed(0))
    teacher[:, 0] *= 100
    lost = torch.zeros_like(teacher)
    everything = loss(lost, teacher).sum()
    without_first, without_others = teacher.clone(), teacher.clone()
    without_first[:, 0], without_others[:, 1:] = 0, 0
    for student in (without_first, without_others):
        assert 1 / 3 < loss(student, teacher).sum() / everything < 2 / 3


def test_a_constant_vector_has_a_finite_loss() -> None:
    constant = torch.ones(1, 2, 8)
    assert loss(constant, constant).tolist() == [0, 0]
    assert torch.isfinite(loss(constant + 1, constant)).all()


def test_it_needs_nothing_of_the_teacher_but_its_blocks() -> None:
    assert frozenset() == NEEDS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("batch", 0),
        ("learning_rate", 0),
        ("learning_rate", float("inf")),
        ("scale_rate", -1),
        ("inputs", "teacher"),
        ("held_out", 0),
        ("held_out", 1),
        ("steps", 3),
    ],
)
def test_settings_that_cannot_be(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        Config.model_validate({field: value})
