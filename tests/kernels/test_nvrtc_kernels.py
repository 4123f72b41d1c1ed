"""The CUDA C++ kernels themselves, run on the CPU (on_cpu.py): every kind, size and edge, exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.errors import InputError
from compress.formats import sparse24
from compress.formats.grid import Quantized, dequantize
from compress.formats.pattern import keep_largest
from compress.formats.scheme import FLOATS, Scheme, pruned, scheme_named
from compress.kernels import build, cuda
from compress.kernels.reference import quantize_tokens
from compress.kernels.sparse import launch as sparse
from compress.kernels.triton.launch import Shape
from tests.kernels import on_cpu

GENERATOR = torch.Generator().manual_seed(0)
CPU = torch.device("cpu")
SCHEMES = {
    "floats": FLOATS,
    "int8": scheme_named("W8A8"),
    **{f"int4 g{group}": scheme_named("W4A16", group) for group in (32, 96, 128)},
    "int4 channel": scheme_named("W4A16", "channel"),
}
SCHEMES = {name: pruned(scheme, sparse24.PATTERN) for name, scheme in SCHEMES.items()}


pytestmark = pytest.mark.skipif(on_cpu.unavailable() is not None, reason=str(on_cpu.unavailable()))


def random_weight(scheme: Scheme, rows: int, columns: int, dtype: torch.dtype) -> Quantized:
    """Small integers under scales that are powers of two: every product and every sum is exact in float32."""
    grid = scheme.grid
    mask = keep_largest(torch.rand(rows, columns, generator=GENERATOR), sparse24.PATTERN)
    low, high = (-16, 16) if grid.bits == 16 else (grid.minimum, grid.maximum + 1)
    q = torch.randint(low, high, (rows, columns), generator=GENERATOR) * mask
    if grid.bits == 16:
        return Quantized(q.to(dtype), torch.ones(rows, 1), mask=mask)
    scale = torch.randint(-4, 0, (rows, grid.groups(columns)), generator=GENERATOR).exp2().to(dtype)
    return Quantized(q.to(torch.int8), scale, mask=mask)


def product(x: Tensor, weight: Quantized, scheme: Scheme, processors: int, late: bool) -> Tensor:
    """What the kernels make of it."""
    rows, columns, dtype, pointers = cuda.arrange(sparse24.pack(weight, scheme.grid), scheme, CPU)
    assert (rows, columns, dtype) == (*weight.q.shape, x.dtype)
    plan = sparse.product(Shape(len(x), rows, columns), build.kept_values(scheme), build.DTYPE_NAMES[dtype], processors)
    assert ("partial" in plan.buffers) == (processors > 1), "split or not, as the test means it"
    out = torch.full((len(x), rows), 99.0, dtype=dtype)
    on_cpu.run(plan, {**pointers, "x": x, "out": out}, late)
    return out


def wanted(x: Tensor, weight: Quantized, scheme: Scheme) -> Tensor:
    """The same by definition."""
    if scheme.activation_bits is None:
        return (x.double() @ dequantize(weight).double().T).to(x.dtype)
    integers, step = quantize_tokens(x, 127.5)
    sums = (integers.double() @ weight.q.double().T).float()
    return (sums * step * weight.scale.float().T).to(x.dtype)


@pytest.mark.parametrize("processors", [0, 64], ids=["whole", "split"])
@pytest.mark.parametrize("tokens", [1, 16, 17, 70])
@pytest.mark.parametrize("name", SCHEMES)
def test_products_are_exact(name: str, tokens: int, processors: int) -> None:
    """Rows that fill no strip or program, columns that fill no block, tokens that fill no tile; split or not."""
    scheme = SCHEMES[name]
    rows, columns = (72, 672) if scheme.grid.group_size == 96 else (72, 640 + 16 * (scheme.grid.group_size is None))
    weight = random_weight(scheme, rows, columns, torch.bfloat16)
    x = torch.randint(-8, 9, (tokens, columns), generator=GENERATOR).to(torch.bfloat16)
    for late in (True, False):
        assert torch.equal(product(x, weight, scheme, processors, late), wanted(x, weight, scheme))


@pytest.mark.parametrize("name", ["floats", "int8", "int4 g128"])
def test_float16(name: str) -> None:
    scheme = SCHEMES[name]
    weight = random_weight(scheme, 48, 512, torch.float16)
    x = torch.randint(-8, 9, (5, 512), generator=GENERATOR).to(torch.float16)
    assert torch.equal(product(x, weight, scheme, 64, True), wanted(x, weight, scheme))


def test_int4_weights_are_rounded_as_the_reference_rounds_them() -> None:
    """One column at a time: out is the weight itself, q * scale in bfloat16."""
    scheme = SCHEMES["int4 g32"]
    weight = random_weight(scheme, 16, 128, torch.bfloat16)
    weight.scale.copy_(torch.randn(weight.scale.shape, generator=GENERATOR))
    got = product(torch.eye(128, dtype=torch.bfloat16), weight, scheme, 0, True)
    assert torch.equal(got.T, dequantize(weight).to(torch.bfloat16))


def test_activations_are_quantized_as_the_reference_does_it() -> None:
    """Ordinary tokens, one of zeros, and ones with an infinity and a NaN, which show in every product."""
    scheme = SCHEMES["int8"]
    weight = random_weight(scheme, 32, 256, torch.bfloat16)
    x = torch.randn(6, 256, generator=GENERATOR).to(torch.bfloat16)
    x[1], x[2, 7], x[3, 9] = 0, torch.inf, torch.nan
    got, want = product(x, weight, scheme, 0, True), wanted(x, weight, scheme)
    assert not got[2:4].isfinite().any()
    for token in (0, 1, 4, 5):
        assert torch.equal(got[token], want[token])


@pytest.mark.parametrize(
    ("shape", "kept", "dtype", "words"),
    [
        (Shape(1, 16, 24), sparse.Kept(16), "bf16", "16 x 24 has no multiple of 16 columns"),
        (Shape(1, 16, 64), sparse.Kept(4, 16), "bf16", "need groups of 32 columns or a multiple, not 16"),
        (Shape(1, 16, 64), sparse.Kept(8, 32), "bf16", "need one scale per row, not one per group"),
        (Shape(1, 16, 64), sparse.Kept(3), "bf16", "read 16, 8, 4 bits, not 3"),
        (Shape(1, 16, 64), sparse.Kept(16), "fp32", "activations are fp32, not bf16 or fp16"),
        (Shape(1 << 20, 16, 4096), sparse.Kept(16), "bf16", "need offsets of more than 31 bits"),
    ],
)
def test_what_no_binary_multiplies_is_refused(shape: Shape, kept: sparse.Kept, dtype: str, words: str) -> None:
    with pytest.raises(InputError, match=f"^kernels: .*{words}.*: use the reference kernel$"):
        sparse.product(shape, kept, dtype, 132)
