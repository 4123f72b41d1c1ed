"""Output of a decoder block pulled towards that of the teacher's block: what layer-wise recovery trains towards.

The reconstruction of BRECQ (arXiv 2102.05426, section 3.2) for a whole block, weights and steps free to move. It needs
no logits, hence nothing of the teacher but its blocks.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

NEEDS: frozenset[str] = frozenset()

# Below it a teacher's vector counts as constant: of what float32 holds of a hidden state, noise.
LEAST_VARIANCE = 1e-12


class Config(BaseModel):
    """How each block is trained before the next is read.

    epochs: passes over the sequences. held_out: the share of them, at least one batch, that is not trained on: its
    error at the start and after each epoch decides which iterate is kept. batch: sequences per step. learning_rate: of
    weights, the peak of a cosine; scale_rate: of quantization scales, as a share of it. inputs: what a block reads in
    training: `compressed`, what the compressed blocks before it make; `float`, what the teacher's make; `mix`, one of
    both in every step, by lot.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    epochs: int = Field(default=2, ge=1)
    batch: int = Field(default=4, ge=1)
    learning_rate: float = Field(default=5e-3, gt=0, allow_inf_nan=False)
    scale_rate: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    inputs: Literal["compressed", "float", "mix"] = "compressed"
    held_out: float = Field(default=0.125, gt=0, lt=1)
    seed: int = Field(default=0, ge=0)


def loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Squared difference over the variance of the teacher's vectors, [n], of hidden states [..., D] at n positions.

    Half of it over the variance at the position itself, half over the mean of all n. The first token of a sequence,
    where attention goes to rest, has vectors a hundred times as long as all others (arXiv 2402.17762). A common
    variance sees nothing else. By its own one it is a position among hundreds, given up for a small gain elsewhere;
    but a student that loses it loses its attention.
    """
    error = (student - teacher).square().mean(dim=-1).flatten()
    variance = teacher.var(dim=-1, correction=0).flatten()
    own, common = (each.clamp(min=LEAST_VARIANCE) for each in (variance, variance.mean()))
    return error * (1 / own + 1 / common) / 2
