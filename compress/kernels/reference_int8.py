"""What the CPU kernel computes, in plain torch: the reference, with int8 activations where weights are grouped.

Weight-only schemes (W4A16, W8A16, with 2:4 sparsity or without) leave activations as they are in the reference kernel;
the CPU kernel rounds them to int8, one step per group of columns. This is its twin: the fast path must agree with it,
and what lies between it and the reference is the price of int8 activations.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from compress.formats.grid import FLOAT_BITS
from compress.kernels import reference
from compress.kernels.cpu.kernel import GROUP_LEVELS, activation_group
from compress.kernels.reference import quantize_tokens

NAME = "reference-int8"

refuses = reference.refuses
prepare = reference.prepare
outlier_counts = reference.outlier_counts


def matmul(x: Tensor, prepared: Any) -> Tensor:
    """x [..., K] times the transposed weight: [..., N], in the dtype of x."""
    scheme = prepared.scheme
    if scheme.activation_bits is not None or scheme.grid.bits == FLOAT_BITS:
        return reference.matmul(x, prepared)
    group = activation_group(scheme, x.shape[-1])
    integers, step = quantize_tokens(x.reshape(-1, group), GROUP_LEVELS)
    return reference.matmul((integers * step).to(x.dtype).view(x.shape), prepared)
