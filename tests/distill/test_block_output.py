"""Block output loss against a loop over positions."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from compress.distill.block_output import NEEDS, Config, loss


def test_loss_is_the_squared_error_over_the_variance_of_each_position() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 2, 3, 5, generator=generator, dtype=torch.float64)
    expected = []
    for ours, theirs in zip(student.reshape(-1, 5).tolist(), teacher.reshape(-1, 5).tolist(), strict=True):
        mean = sum(theirs) / 5
        variance = sum((value - mean) ** 2 for value in theirs) / 5
        error = sum((one - other) ** 2 for one, other in zip(ours, theirs, strict=True)) / 5
        expected.append(error / variance)
    assert loss(student, teacher).tolist() == pytest.approx(expected, rel=1e-12)


def test_no_position_drowns_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 1, 4, 64, generator=generator)
    plain = loss(student, teacher)
    size = torch.tensor([1000.0, 1, 1, 1]).view(1, 4, 1)
    assert torch.allclose(loss(student * size, teacher * size), plain, rtol=1e-5)


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
