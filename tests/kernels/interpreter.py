"""Runs plans of Triton kernels on CPU tensors, through Triton's interpreter, in a process of its own.

Triton decides when it is imported whether it compiles or interprets; the tests of ahead-of-time compilation, in this
process, want the former.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compress.kernels import aot
from compress.kernels.triton.launch import Plan, Step

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "i8": torch.int8,
    "i32": torch.int32,
    "i64": torch.int64,
}


def interpreted(plan: Plan, tensors: dict[str, Tensor], target: str = "sm_90") -> dict[str, Tensor]:
    """What `plan` makes of `tensors` (by argument name): all of them, outputs and buffers included, after it.

    target: whose constants the functions get.
    """
    return _process().submit(run, plan, tensors, target).result()


def run(plan: Plan, tensors: dict[str, Tensor], target: str) -> dict[str, Tensor]:
    """Every step of `plan`, here. Buffers begin as garbage; pointers that nobody gave are for nobody to follow."""
    tensors = dict(tensors)
    for name, (dtype, shape) in plan.buffers.items():
        tensors[name] = torch.full(shape, 77, dtype=DTYPES[dtype])
    for step in plan.steps:
        _launch(step, tensors, target)
    return tensors


def _launch(step: Step, tensors: dict[str, Tensor], target: str) -> None:
    (variant,) = [variant for variant in aot.variants() if variant.name == step.name]
    arguments: dict[str, Any] = {}
    for name, kind in variant.signature.items():
        if kind.startswith("*"):
            nothing = torch.empty(0, dtype=DTYPES[kind[1:]])
            arguments[name] = tensors.get(name, nothing)
        else:
            arguments[name] = step.scalars[name]
    assert set(step.scalars) <= set(arguments), "a scalar that the variant does not take"
    aot.function(variant)[step.grid](**arguments, **aot.constants_for(variant, target))


@cache
def _process() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _interpret)
    atexit.register(pool.shutdown)
    return pool


def _interpret() -> None:
    """Make this process one that interprets, and mend what Triton's interpreter (3.9) gets wrong."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    builder = InterpreterBuilder
    dot, splat, cast = builder.create_dot, builder.create_splat, builder.cast_impl

    def widened_dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        """It keeps bfloat16 as its bits and would multiply those: float32 holds the same values."""
        if left.dtype.scalar == tl.bfloat16:
            left, right = self.cast_impl(left, tl.float32), self.cast_impl(right, tl.float32)
        return dot(self, left, right, *rest)

    def truthful_splat(self: Any, kind: Any, value: Any) -> Any:
        """It spreads the result of comparing two scalars as 32-bit numbers, which no mask may be."""
        spread = splat(self, kind, value)
        spread.data = spread.data.astype(value.data.dtype)
        return spread

    def rounding_cast(self: Any, value: Any, kind: Any) -> Any:
        """It cuts the bits off that bfloat16 has no room for, where a GPU rounds to the nearest."""
        changed = cast(self, value, kind)
        if value.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            rounded = torch.from_numpy(value.data.copy()).to(torch.bfloat16).view(torch.uint16)
            changed.data = rounded.numpy().reshape(changed.data.shape)
        return changed

    builder.create_dot, builder.create_splat, builder.cast_impl = widened_dot, truthful_splat, rounding_cast
