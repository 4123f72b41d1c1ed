"""The reference kernel: plain torch, every format, any device. Slow is allowed, wrong is not.

Weights stay packed (those of `sparse24` with their pruned columns filled in) and are dequantized a few rows at a time,
so that the temporary stays small. `int-quantized` (W8A8) rounds its activations per token and multiplies in floating
point, operation for operation as compressed-tensors does: the next layer's rounding amplifies a last bit, so that exact
integer sums, tried on a model of 135M parameters, moved logits by 10% from what transformers computes from the same
file. `int8-outlier` is LLM.int8() (arXiv 2208.07339, section 3.2): outlier columns leave the activations first and are
multiplied in floating point, the rest are integers whose products are summed exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.formats import FORMATS, format_named, int8_outlier, int_quantized, pack_quantized, sparse24
from compress.formats.grid import Quantized, dequantize
from compress.formats.scheme import Scheme

NAME = "reference"

# The activation step is the token's absmax divided by this. compressed-tensors spreads [-absmax, absmax] over the whole
# range -128..127 and clamps; LLM.int8() uses the symmetric -127..127. Another number is another model. A 2:4 model is
# that which `int-quantized` stores with its zeros.
LEVELS = {int_quantized.NAME: 127.5, int8_outlier.NAME: 127.0, sparse24.NAME: 127.5}

# Weights dequantized at a time: 4 MiB as float32, which stays in cache.
CHUNK = 1 << 20

# int8 products are at most 2^14 in magnitude, so sums over this many columns are integers below 2^24: exact in float32.
EXACT_COLUMNS = 1 << 10


@dataclass(frozen=True)
class Prepared:
    """A packed weight of N rows and K columns, resident on its device.

    weight: int32 [N, K * bits / 32] (pack-quantized), int8 [N, K], or 16-bit floats [N, K] with scales of 1 (2:4
    floats). scale: [N, G]. zero: int8 [N, G] or None.
    outlier_columns: int64 [n]; outlier_weight: 16-bit [N, n]. counts: int64 [2], activations of at least the threshold
    outside the outlier columns, and all activations seen; `matmul` adds to it.
    """

    scheme: Scheme
    weight: Tensor
    scale: Tensor
    zero: Tensor | None = None
    outlier_columns: Tensor | None = None
    outlier_weight: Tensor | None = None
    counts: Tensor | None = None


def refuses(scheme: Scheme, device: torch.device) -> str | None:
    """The reason why weights of `scheme` cannot be multiplied on `device`, or None."""
    return None if scheme.format in FORMATS else "unknown format"


def prepare(tensors: dict[str, Tensor], scheme: Scheme, device: torch.device) -> Prepared:
    """Stored `tensors` (by suffix) on `device`. Scales and zero points are unpacked; the weight is if it is 2:4."""
    tensors = {suffix: tensor.to(device) for suffix, tensor in tensors.items()}
    if scheme.format == pack_quantized.NAME:
        zero = pack_quantized.unpack_zero(tensors, scheme.grid)
        return Prepared(scheme, tensors["weight_packed"], tensors["weight_scale"], zero)
    stored = format_named(scheme.format).unpack(tensors, scheme.grid)
    prepared = Prepared(scheme, stored.q, stored.scale)
    if stored.outlier_columns is None:
        return prepared
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    return replace(
        prepared, outlier_columns=stored.outlier_columns.long(), outlier_weight=stored.outlier_weight, counts=counts
    )


def matmul(x: Tensor, prepared: Prepared) -> Tensor:
    """x [..., K] times the transposed weight: [..., N], in the dtype of x."""
    tokens = x.reshape(-1, x.shape[-1])
    if prepared.outlier_columns is None:
        product = _dequantizing(round_activations(tokens, prepared.scheme), prepared)
    else:
        product = _outliers_apart(tokens, prepared)
    return product.view(*x.shape[:-1], product.shape[-1])


def outlier_counts(prepared: Prepared) -> tuple[int, int] | None:
    """(activations over the threshold outside the outlier columns, activations seen); None without such columns."""
    if prepared.counts is None:
        return None
    missed, seen = prepared.counts.tolist()
    return missed, seen


def quantize_tokens(x: Tensor, levels: float = 127.0) -> tuple[Tensor, Tensor]:
    """Symmetric dynamic quantization, one step per token: int8 [T, K] and float32 [T, 1] with x ~ integers * step.

    A token with a NaN or an infinity gets a step that is not finite, so that it shows in every product.
    """
    x = x.float()
    step = x.abs().amax(dim=-1, keepdim=True) / levels
    step = torch.where(step == 0, torch.ones_like(step), step)
    # Ties go to the even integer and the ends are clamped, as in compressed-tensors.
    return (x / step).round_().clamp_(-128, 127).to(torch.int8), step


def round_activations(x: Tensor, scheme: Scheme, outlier_columns: Tensor | None = None) -> Tensor:
    """What a layer of `scheme` makes of its input x [..., K] before it multiplies, in the dtype of x.

    Calibration propagates this through dense weights: the result equals `matmul` but for float32 rounding.
    """
    if scheme.activation_bits is None:
        return x
    columns = None if outlier_columns is None else outlier_columns.to(x.device).long()
    integers, step = quantize_tokens(_without(x, columns), LEVELS[scheme.format])
    rounded = (integers * step).to(x.dtype)
    if columns is not None:
        rounded[..., columns] = x[..., columns]
    return rounded


def integer_matmul(left: Tensor, right: Tensor) -> Tensor:
    """int8 [T, K] times transposed int8 [N, K], accumulated exactly: int32 [T, N]."""
    if left.device.type == "cpu" and _int_mm_is_exact():
        return torch._int_mm(left, right.T)
    rows, columns = left.shape
    if left.device.type == "cuda" and columns % 8 == 0 and right.shape[0] % 8 == 0:
        # cuBLAS wants more than 16 rows.
        return torch._int_mm(F.pad(left, (0, 0, 0, max(0, 17 - rows))), right.T)[:rows]
    return _float_matmul(left, right)


def _dequantizing(tokens: Tensor, prepared: Prepared) -> Tensor:
    rows = max(1, CHUNK // tokens.shape[-1])
    parts = []
    for start in range(0, prepared.weight.shape[0], rows):
        weight = _weight_rows(prepared, slice(start, start + rows)).to(tokens.dtype)
        parts.append(F.linear(tokens, weight))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _weight_rows(prepared: Prepared, rows: slice) -> Tensor:
    """Dequantized float32 rows of the weight."""
    q = prepared.weight[rows]
    if prepared.scheme.format == pack_quantized.NAME:
        q = pack_quantized.unpack_words(q, prepared.scheme.grid.bits)
    return dequantize(Quantized(q, prepared.scale[rows], None if prepared.zero is None else prepared.zero[rows]))


def _outliers_apart(tokens: Tensor, prepared: Prepared) -> Tensor:
    scheme, columns = prepared.scheme, prepared.outlier_columns
    inside = _without(tokens, columns)
    if prepared.counts is not None and scheme.threshold is not None:
        prepared.counts[0] += (inside.abs() >= scheme.threshold).sum()
        prepared.counts[1] += tokens.numel()
    integers, step = quantize_tokens(inside, LEVELS[scheme.format])
    product = integer_matmul(integers, prepared.weight).float() * step * prepared.scale.float().T
    if columns is not None and prepared.outlier_weight is not None:
        product += F.linear(tokens[:, columns].float(), prepared.outlier_weight.float())
    return product.to(tokens.dtype)


def _without(x: Tensor, columns: Tensor | None) -> Tensor:
    """x with `columns` set to zero, so that they count neither in the token's absmax nor in the integer product."""
    return x if columns is None else x.index_fill(-1, columns, 0)


def _float_matmul(left: Tensor, right: Tensor) -> Tensor:
    total = torch.zeros(left.shape[0], right.shape[0], dtype=torch.int32, device=left.device)
    for start in range(0, left.shape[1], EXACT_COLUMNS):
        block = slice(start, start + EXACT_COLUMNS)
        total += F.linear(left[:, block].float(), right[:, block].float()).to(torch.int32)
    return total


@cache
def _int_mm_is_exact() -> bool:
    """Whether this CPU's int8 product is exact at the extremes, where processors without VNNI saturate in 16 bits."""
    extremes = torch.tensor([127, -128], dtype=torch.int8)
    right = extremes.repeat(32, 64)
    for rows in (1, 32):
        for left in (extremes.repeat(rows, 64), extremes[:1].expand(rows, 128), extremes[1:].expand(rows, 128)):
            left = left.contiguous()
            for weight in (right, right.roll(1, dims=1), extremes[:1].expand(32, 128), extremes[1:].expand(32, 128)):
                if not torch.equal(torch._int_mm(left, weight.contiguous().T), _float_matmul(left, weight)):
                    return False
    return True
