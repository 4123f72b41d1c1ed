"""What is launched, in which order, with which grid: plain Python, no Triton, for whoever runs the binaries.

A plan is a tuple of steps, run one after the other on one stream. A step names the variant (aot.py) whose binary runs,
its grid, and its scalars by argument name. Pointers are the caller's, by argument name: the inputs and outputs named in
each plan's docstring, and the plan's buffers, which need no initial values. Pointers that a variant never follows (no
zero points, no outliers, one part only) may be null. What the compiler was told, and the caller therefore owes:
every pointer is a multiple of 16 bytes, and every scalar in MULTIPLES_OF_16 a multiple of 16.

Tile sizes were chosen from the code that comes out (registers, no spills, wide loads), on a machine without a GPU. They
have not been timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compress.errors import InputError

MULTIPLES_OF_16 = frozenset({"rows", "columns", "padded"})
DTYPES = ("bf16", "fp16")
# Bits -> columns of a block that may share a scale. 8 bits at 64 serve larger groups and rows as well.
SPANS: Mapping[int, tuple[int, ...]] = {4: (32, 64, 128), 8: (64,)}
HEAD_WIDTHS = (64, 128)

# Constants of each function by the size of the job: tokens in a tile, rows of the weight, depth of a step. JOINED is
# the compute capability (times 10) from which w4a16.matrix makes one product of a block, and no launch depends on it.
TILES: Mapping[str, dict[str, int]] = {
    "w4a16_vector": {"BLOCK_N": 4, "BLOCKS": 8},
    "w4a16_narrow": {"BLOCK_N": 64, "BLOCK_M": 16, "JOINED": 100},
    "w4a16_wide": {"BLOCK_N": 128, "BLOCK_M": 64, "JOINED": 100},
    "w4a16_combine": {"BLOCK": 1024},
    "w8a8_quantize": {"BLOCK": 2048, "TILE": 16},
    "w8a8_narrow": {"BLOCK_N": 64, "BLOCK_M": 16, "BLOCK_K": 128, "TILE": 16},
    "w8a8_wide": {"BLOCK_N": 128, "BLOCK_M": 64, "BLOCK_K": 64, "TILE": 16},
    "w8a8_combine": {"BLOCK_N": 64, "BLOCK_M": 16, "TILE": 16},
    "attention_attend": {"PAGE": 64, "ROWS": 16},
    "attention_combine": {},
}
# Programs that a multiprocessor should have to choose from while others wait for memory.
PROGRAMS = {"w4a16_vector": 16, "w4a16_narrow": 4, "w4a16_wide": 1, "w8a8_narrow": 4, "w8a8_wide": 1}
PROGRAMS["attention_attend"] = 4
# Least steps of the loop that are worth a program of their own, and its float32 partial sums.
LEAST_STEPS = 4
# Offsets inside the kernels are 32 bits wide (but for the cache, which may be larger).
OFFSETS = 1 << 31
GRID_LIMIT = 65535


@dataclass(frozen=True)
class Shape:
    """x [tokens, columns] times the transpose of a weight [rows, columns]."""

    tokens: int
    rows: int
    columns: int


@dataclass(frozen=True)
class Packing:
    """A pack-quantized weight: its bits, its group size as layout.split_groups gives it, and if it has zero points."""

    bits: int
    group: int | None
    asymmetric: bool = False

    @property
    def block(self) -> int:
        """Columns of a block."""
        return block_columns(self.bits)

    @property
    def span(self) -> int:
        """Columns that surely share a scale: what the compiled variant counts on."""
        return self.block if self.group is None else min(self.group, self.block)


def block_columns(bits: int) -> int:
    """Columns of one block (layout.py), 16 words: 128 of 4 bits, 64 of 8."""
    return 512 // bits


@dataclass(frozen=True)
class Heads:
    """Attention of `query` heads over `key` heads of `width` channels, in pages of 16-bit or int8 numbers."""

    query: int
    key: int
    width: int
    int8: bool = False


@dataclass(frozen=True)
class Step:
    """One launch of the variant called `name`."""

    name: str
    grid: tuple[int, int, int]
    scalars: dict[str, int | float]


@dataclass(frozen=True)
class Plan:
    """Steps in order, and what they write in passing: argument name -> (Triton's name of the type, shape)."""

    steps: tuple[Step, ...]
    buffers: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)


def product_refuses(shape: Shape, dtype: str, packing: Packing | None = None) -> str | None:
    """The reason why no binary multiplies these, or None. packing: None for int8 weights."""
    if dtype not in DTYPES:
        return f"activations are {dtype}, not {' or '.join(DTYPES)}"
    if shape.rows % 16 or shape.columns % 16:
        return f"a weight of {shape.rows} x {shape.columns} is not a multiple of 16 both ways"
    if packing is not None and packing.span not in SPANS[packing.bits]:
        least = min(SPANS[packing.bits])
        return f"{packing.bits} bits need groups of {least} columns or a multiple, not {packing.group}"
    if max(shape.rows * shape.columns, shape.tokens * max(shape.rows, shape.columns)) >= OFFSETS:
        return f"{shape.tokens} tokens, {shape.rows} x {shape.columns} need offsets of more than 31 bits"
    return None


def packed_product(shape: Shape, packing: Packing, dtype: str, processors: int) -> Plan:
    """Pack-quantized weights on a device of `processors` multiprocessors: x, words, scales, zeros -> out.

    Buffer: partial, where columns are split.
    """
    _require(product_refuses(shape, dtype, packing))
    blocks = ceil_div(shape.columns, packing.block)
    kind = size(shape.tokens, vector=True)
    tile = TILES[f"w4a16_{kind}"]
    depth = tile["BLOCKS"] if kind == "vector" else 1
    tiles = ceil_div(shape.rows, tile["BLOCK_N"]) * (1 if kind == "vector" else ceil_div(shape.tokens, tile["BLOCK_M"]))
    # A vector's step is as deep as four of the others, so that its parts may be as short as one.
    least = 1 if kind == "vector" else LEAST_STEPS
    split = parts(tiles, ceil_div(blocks, depth), processors * PROGRAMS[f"w4a16_{kind}"], least)
    scalars: dict[str, int | float] = {
        "rows": shape.rows,
        "columns": shape.columns,
        "blocks": blocks,
        "groups": 1 if packing.group is None else shape.columns // packing.group,
        "shift": 31 if packing.group is None else packing.group.bit_length() - 1,
        "asymmetric": int(packing.asymmetric),
        "split": split,
    }
    if kind == "vector":
        grid = (tiles, split, 1)
    else:
        scalars["tokens"] = shape.tokens
        grid = (ceil_div(shape.tokens, tile["BLOCK_M"]), ceil_div(shape.rows, tile["BLOCK_N"]), split)
    first = Step(f"w{packing.bits}a16_{kind}_g{packing.span}_{dtype}", grid, scalars)
    if split == 1:
        return Plan((first,))
    count = shape.tokens * shape.rows
    last = Step(
        f"w4a16_combine_{dtype}",
        (ceil_div(count, TILES["w4a16_combine"]["BLOCK"]), 1, 1),
        {"count": count, "split": split},
    )
    return Plan((first, last), {"partial": ("fp32", (split, shape.tokens, shape.rows))})


def int8_product(
    shape: Shape, dtype: str, processors: int, outliers: int | None = None, threshold: float = 0.0
) -> Plan:
    """int8 weights, activations quantized per token: x, weight, scale -> out.

    outliers: None for W8A8. Else their number: the format is LLM.int8(), and the plan takes ordinary, outlier_columns
    and outlier_weight (layout.outlier_tiles), and adds to counts. Buffers: integers, steps, gathered, partial.
    """
    _require(product_refuses(shape, dtype))
    prefix = "w8a8" if outliers is None else "llm_int8"
    padded = ceil_div(outliers or 0, TILES["w8a8_narrow"]["TILE"]) * TILES["w8a8_narrow"]["TILE"]
    kind = size(shape.tokens, vector=False)
    tile = TILES[f"w8a8_{kind}"]
    across = (ceil_div(shape.tokens, tile["BLOCK_M"]), ceil_div(shape.rows, tile["BLOCK_N"]))
    split = parts(
        across[0] * across[1],
        ceil_div(shape.columns, tile["BLOCK_K"]),
        processors * PROGRAMS[f"w8a8_{kind}"],
        LEAST_STEPS,
    )
    sizes: dict[str, int | float] = {"tokens": shape.tokens, "rows": shape.rows, "padded": padded}
    steps = [
        Step(
            f"{prefix}_quantize_{dtype}",
            (shape.tokens, 1, 1),
            {
                "columns": shape.columns,
                "outliers": outliers or 0,
                "padded": padded,
                "levels": 127.5 if outliers is None else 127.0,
                "threshold": threshold,
            },
        ),
        Step(f"{prefix}_{kind}_{dtype}", (*across, split), {**sizes, "columns": shape.columns, "split": split}),
    ]
    buffers: dict[str, tuple[str, tuple[int, ...]]] = {
        "integers": ("i8", (shape.tokens, shape.columns)),
        "steps": ("fp32", (shape.tokens,)),
        "gathered": (dtype, (shape.tokens, padded)),
    }
    if split > 1:
        small = TILES["w8a8_combine"]
        grid = (ceil_div(shape.tokens, small["BLOCK_M"]), ceil_div(shape.rows, small["BLOCK_N"]), 1)
        steps.append(Step(f"{prefix}_combine_{dtype}", grid, {**sizes, "split": split}))
        buffers["partial"] = ("i32", (split, shape.tokens, shape.rows))
    return Plan(tuple(steps), buffers)


@dataclass(frozen=True)
class Scores:
    """scale multiplies query times key; then cap * tanh(score / cap) if cap is positive; window 0 sees every key."""

    scale: float
    cap: float = 0.0
    window: int = 0


def attention_refuses(heads: Heads, dtype: str) -> str | None:
    """The reason why no binary attends with these heads, or None."""
    if dtype not in DTYPES:
        return f"activations are {dtype}, not {' or '.join(DTYPES)}"
    if heads.width not in HEAD_WIDTHS:
        return f"heads are {heads.width} wide, not {', '.join(map(str, HEAD_WIDTHS))}"
    return f"{heads.query} query heads do not share {heads.key}" if heads.query % heads.key else None


def attention(heads: Heads, scores: Scores, table: tuple[int, int], dtype: str, processors: int) -> Plan:
    """Decode attention for table [sequences, limit of pages each]: query, keys, values, table, lengths -> out.

    An int8 cache takes key_scales and value_scales too. Only the table's shape counts, not the lengths, so that one
    plan serves every step up to that many pages (and one captured graph). Buffers: partial, logarithms.
    """
    _require(attention_refuses(heads, dtype))
    sequences, limit = table
    tiles = heads.key * ceil_div(heads.query // heads.key, TILES["attention_attend"]["ROWS"])
    split = parts(sequences * tiles, limit, processors * PROGRAMS["attention_attend"], LEAST_STEPS)
    cache = "int8" if heads.int8 else "plain"
    first = Step(
        f"attention_attend_{cache}_d{heads.width}_{dtype}",
        (sequences, tiles, split),
        {
            "heads": heads.query,
            "key_heads": heads.key,
            "limit": limit,
            "scale": scores.scale,
            "cap": scores.cap,
            "window": scores.window,
            "split": split,
        },
    )
    if split == 1:
        return Plan((first,))
    last = Step(f"attention_combine_d{heads.width}_{dtype}", (sequences * heads.query, 1, 1), {"split": split})
    return Plan(
        (first, last),
        {
            "partial": ("fp32", (sequences, heads.query, split, heads.width)),
            "logarithms": ("fp32", (sequences, heads.query, split)),
        },
    )


def size(tokens: int, vector: bool) -> str:
    """Which tile suits so many tokens; `vector`, for exactly one, is not written for every format."""
    if vector and tokens == 1:
        return "vector"
    return "narrow" if tokens <= TILES["w4a16_narrow"]["BLOCK_M"] else "wide"


def parts(tiles: int, steps: int, wanted: int, least: int) -> int:
    """Into how many parts a loop of `steps` is split: times `tiles` about `wanted` programs, and none of them idle."""
    split = max(1, min(ceil_div(wanted, tiles), steps // least, GRID_LIMIT))
    return ceil_div(steps, ceil_div(steps, split))


def ceil_div(number: int, by: int) -> int:
    return -(-number // by)


def _require(reason: str | None) -> None:
    if reason is not None:
        raise InputError(f"kernels: {reason}: use the reference kernel")
