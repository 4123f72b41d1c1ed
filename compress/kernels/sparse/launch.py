"""What is compiled for 2:4 weights, and what is launched: the steps of triton/launch.py, of these kernels.

Tile sizes were chosen from the code that comes out (registers, no spills), on a machine without a GPU. They have not
been timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compress.errors import InputError
from compress.formats import sparse24
from compress.kernels.reference import LEVELS
from compress.kernels.sparse.layout import BLOCK, STRIP
from compress.kernels.triton.launch import DTYPES, LEAST_STEPS, OFFSETS, Plan, Shape, Step, ceil_div, parts

# Bits of the kept values -> columns of a block that may share a scale. Where a scale is a row's, all do.
SPANS: Mapping[int, tuple[int, ...]] = {16: (BLOCK,), 8: (BLOCK,), 4: (32, 64, BLOCK)}
# What is fixed at compilation, by function and size of the job: see source/product.cu.
TILES: Mapping[str, dict[str, int]] = {
    "narrow": {"STRIPS": 1, "TOKEN_TILES": 2, "STAGES": 4},
    "wide": {"STRIPS": 2, "TOKEN_TILES": 8, "STAGES": 2},
    "combine": {},
    "quantize": {},
}
WARPS = {"narrow": 4, "wide": 4, "combine": 8, "quantize": 8}
TOKENS = {kind: 8 * TILES[kind]["TOKEN_TILES"] for kind in ("narrow", "wide")}
# Programs that a multiprocessor should have to choose from while others wait for memory.
PROGRAMS = {"narrow": 4, "wide": 2}


@dataclass(frozen=True)
class Kept:
    """The kept values of a 2:4 weight: their bits, and the columns of a group (a power of two; None: one per row)."""

    bits: int
    group: int | None = None

    @property
    def span(self) -> int:
        """Columns of a block that surely share a scale: what the compiled variant counts on."""
        return BLOCK if self.group is None else min(self.group, BLOCK)


def refuses(shape: Shape, kept: Kept, dtype: str) -> str | None:
    """The reason why no binary multiplies these, or None."""
    if dtype not in DTYPES:
        return f"activations are {dtype}, not {' or '.join(DTYPES)}"
    if kept.bits not in SPANS:
        return f"2:4 kernels read {', '.join(map(str, SPANS))} bits, not {kept.bits}"
    if kept.bits == 8 and kept.group is not None:
        return "2:4 weights of 8 bits need one scale per row, not one per group"
    if kept.span not in SPANS[kept.bits]:
        return f"2:4 weights of {kept.bits} bits need groups of 32 columns or a multiple, not {kept.group}"
    if shape.columns % 16:
        return f"a 2:4 weight of {shape.rows} x {shape.columns} has no multiple of 16 columns"
    if max(shape.rows * shape.columns, shape.tokens * max(shape.rows, shape.columns)) >= OFFSETS:
        return f"{shape.tokens} tokens, {shape.rows} x {shape.columns} need offsets of more than 31 bits"
    return None


def product(shape: Shape, kept: Kept, dtype: str, processors: int) -> Plan:
    """2:4 weights on a device of `processors` multiprocessors: x, values, metadata, scales -> out.

    Buffers: integers and steps for int8, partial where columns are split. Raises InputError for what `refuses` refuses.
    """
    reason = refuses(shape, kept, dtype)
    if reason is not None:
        raise InputError(f"kernels: {reason}: use the reference kernel")
    kind = "narrow" if shape.tokens <= TOKENS["narrow"] else "wide"
    blocks, strips = ceil_div(shape.columns, BLOCK), ceil_div(shape.rows, STRIP)
    across = (ceil_div(shape.tokens, TOKENS[kind]), ceil_div(strips, WARPS[kind] * TILES[kind]["STRIPS"]))
    # A block is as deep as four steps of the other kernels.
    split = parts(across[0] * across[1], blocks, processors * PROGRAMS[kind], LEAST_STEPS // 2)
    sizes: dict[str, int | float] = {"tokens": shape.tokens, "rows": shape.rows, "split": split}
    groups = 1 if kept.group is None else shape.columns // kept.group
    shift = 31 if kept.group is None else kept.group.bit_length() - 1
    steps = []
    buffers: dict[str, tuple[str, tuple[int, ...]]] = {}
    if kept.bits == 8:
        scalars: dict[str, int | float] = {"columns": shape.columns, "levels": LEVELS[sparse24.NAME]}
        steps.append(Step(name("quantize", kept, dtype), (shape.tokens, 1, 1), scalars))
        buffers |= {"integers": ("i8", (shape.tokens, shape.columns)), "steps": ("fp32", (shape.tokens,))}
    scalars = {**sizes, "columns": shape.columns, "groups": groups, "shift": shift}
    steps.append(Step(name(kind, kept, dtype), (*across, split), scalars))
    if split > 1:
        grid = (ceil_div(shape.tokens * shape.rows, 32 * WARPS["combine"]), 1, 1)
        steps.append(Step(name("combine", kept, dtype), grid, sizes))
        buffers["partial"] = ("i32" if kept.bits == 8 else "fp32", (split, shape.tokens, shape.rows))
    return Plan(tuple(steps), buffers)


def name(kind: str, kept: Kept, dtype: str) -> str:
    """Of the variant that does `kind` for such weights."""
    span = f"_g{kept.span}" if kind in TOKENS and kept.bits == 4 else ""
    return f"sparse24_w{kept.bits}_{kind}{span}_{dtype}"


def constants(kind: str, kept: Kept, dtype: str) -> dict[str, int]:
    """What is fixed at compilation: the macros of the sources but for WARPS."""
    fixed = {"BITS": kept.bits, "BF16": int(dtype == "bf16")} | TILES[kind]
    return fixed | {"SPAN": kept.span} if kind in TOKENS else fixed


def signature(kind: str, bits: int, dtype: str) -> dict[str, str]:
    """The arguments of the function of `kind` in source/, in order, by the types of triton/launch.py."""
    if kind == "quantize":
        return {"x": f"*{dtype}", "integers": "*i8", "steps": "*fp32", "columns": "i32", "levels": "fp32"}
    ending = {"scales": f"*{dtype}", "steps": "*fp32", "out": f"*{dtype}"}
    sums = {"partial": "*i32" if bits == 8 else "*fp32"}
    if kind == "combine":
        return sums | ending | dict.fromkeys(("tokens", "rows", "split"), "i32")
    reading = {"integers": "*i8"} if bits == 8 else {"x": f"*{dtype}"}
    reading |= {"values": "*i32", "metadata": "*i32"}
    sizes = ("tokens", "rows", "columns", "groups", "shift", "split")
    return reading | ending | sums | dict.fromkeys(sizes, "i32")
