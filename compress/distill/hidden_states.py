"""Hidden states of student layers pulled towards those of teacher layers, by their squared difference or their angle.

The first is TinyBERT's (arXiv 1909.10351, section 3.1) without its projection, the second DistilBERT's (1910.01108).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt
from torch import Tensor

from compress.distill import HIDDEN_STATES
from compress.errors import USAGE, InputError

NEEDS = frozenset({HIDDEN_STATES})


class Config(BaseModel):
    """kind: `mse`, the squared difference, or `cosine`, 1 minus the cosine of the angle between the two vectors.

    layers: {student layer: teacher layer}, decoder blocks counted from 0; by default every student layer has a partner,
    evenly spread, the last with the last.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["mse", "cosine"] = "mse"
    layers: Annotated[dict[NonNegativeInt, NonNegativeInt], Field(min_length=1)] | None = None


def loss(student: Sequence[Tensor], teacher: Sequence[Tensor], mask: Tensor, settings: Config) -> Tensor:
    """Mean over layer pairs of the mean over positions weighted by `mask` [B, T], a scalar.

    student, teacher: hidden states [B, T, D], the embedding's output and then each block's, as Network.hidden gives
    them. `mse` is the mean over D; no width is rescaled. Computed in float32 (float64 where the student's is).
    Positions of weight 0 are not looked at. InputError as of refuse_layers, and where no position has a weight.
    """
    student_depth, teacher_depth = len(student) - 1, len(teacher) - 1
    refuse_layers(settings, student_depth, teacher_depth, student[-1].shape[-1], teacher[-1].shape[-1])
    kept = mask != 0
    weights = mask[kept].to(torch.promote_types(student[-1].dtype, torch.float32))
    if not weights.numel():
        raise InputError("hidden_states: no position of this batch has a weight: leave such sequences out")
    pairs = layer_map(settings, student_depth, teacher_depth)
    distances = [
        _distance(student[one + 1][kept].to(weights.dtype), teacher[other + 1][kept].to(weights.dtype), settings.kind)
        for one, other in pairs.items()
    ]
    return (torch.stack(distances).mean(dim=0) * weights).sum() / weights.sum()


def layer_map(settings: Config, student_layers: int, teacher_layers: int) -> dict[int, int]:
    """Teacher layer of each student layer that has one.

    By default student layer i of S meets the teacher layer of T that ends the same share of the depth, rounded up:
    ceil((i + 1) T / S) - 1, so that 3 of 6 layers become 1, 3 and 5.
    """
    if settings.layers is not None:
        return settings.layers
    return {i: -(-(i + 1) * teacher_layers // student_layers) - 1 for i in range(student_layers)}


def refuse_layers(
    settings: Config, student_layers: int, teacher_layers: int, student_width: int, teacher_width: int
) -> None:
    """InputError where the layer map reaches beyond a depth, or where the hidden widths differ."""
    if student_width != teacher_width:
        raise InputError(
            f"hidden_states: the student is {student_width} wide and the teacher {teacher_width}: vectors of different"
            " width cannot be compared: leave hidden_states out, or keep the teacher's hidden width",
            USAGE,
        )
    chosen = settings.layers or {}
    for role, layers, depth in (("student", chosen, student_layers), ("teacher", chosen.values(), teacher_layers)):
        beyond = [layer for layer in layers if layer >= depth]
        if beyond:
            raise InputError(
                f"hidden_states.layers: {role} layer {beyond[0]} of a {role} with {depth} layers: give layers"
                f" from 0 to {depth - 1}",
                USAGE,
            )


def _distance(student: Tensor, teacher: Tensor, kind: str) -> Tensor:
    """Distance [n] of vectors [n, D]."""
    if kind == "mse":
        return (student - teacher).square().mean(dim=-1)
    return 1 - torch.nn.functional.cosine_similarity(student, teacher, dim=-1)
