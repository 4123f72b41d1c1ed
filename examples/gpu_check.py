"""Every GPU kernel on one NVIDIA card: right, how fast, and how close to what the card can do.

    python examples/gpu_check.py --json gpu.json

Measures the card's own limits first (a large copy, a large bfloat16 product), then each scheme over the layers of a 1B
and an 8B Llama beside torch's bfloat16 product (cuBLAS), decode attention beside torch's, and a whole 1.1B model that
decodes in CUDA graphs. Ends within --seconds; what did not fit is named. Exit code 1 where a kernel is wrong, 2 without
a GPU. --dry-run goes through the same motions on the CPU, small and with the reference kernel: its times mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.errors import InputError
from compress.formats import format_named
from compress.formats.grid import FLOAT_BITS, Quantized
from compress.formats.pattern import Pattern, keep_largest
from compress.formats.scheme import FLOATS, Scheme, pruned, scheme_named
from compress.kernels import Kernel, reference
from compress.kernels.cuda import Attention, CudaKernel, PagedCache
from compress.kernels.triton import launch

NO_GPU = 2
WRONG = 1
# Signal to noise that rounding to bfloat16 leaves to a right product; a wrong one has less than 10 dB.
PARITY_DB = 40.0
DTYPE = torch.bfloat16
REPLAYS = 20
PAGE = launch.TILES["attention_attend"]["PAGE"]

SCHEMES = {
    **{f"W4A16 g{group}": scheme_named("W4A16", group) for group in (64, 128)},
    **{"W8A16 g128": scheme_named("W8A16"), "W8A8": scheme_named("W8A8"), "LLM_INT8": scheme_named("LLM_INT8")},
}
SPARSE = [pruned(scheme, Pattern(2, 4)) for scheme in (FLOATS, SCHEMES["W8A8"], SCHEMES["W4A16 g128"])]
SCHEMES |= {scheme.name: scheme for scheme in SPARSE}
OUTLIERS = 16
TOKENS = (1, 4, 16, 64, 512, 2048)
# [N, K] of TinyLlama 1.1B and Llama 3 8B.
LAYERS = {"1B qkv": (2560, 2048), "1B gate": (5632, 2048), "1B down": (2048, 5632)}
LAYERS |= {"8B qkv": (6144, 4096), "8B gate": (14336, 4096), "8B down": (4096, 14336)}
# (sequences, tokens held by each), with the heads of Llama 3 8B.
ATTENTION = ((1, 1024), (1, 16384), (16, 2048), (64, 1024))
HEADS = (32, 8, 128)
MODEL = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}
MODEL |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64}
SMALL = {"vocab_size": 288, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
BATCHES = (1, 4, 16)
CONTEXT = 512
# The part of the time that single products may take.
SHARE = 0.6

Row = dict[str, Any]
Job = tuple[str, Callable[[], Row]]


@dataclass(frozen=True)
class Card:
    """What is measured on: a GPU, or with `rehearsal` the CPU. copy, product: bytes and operations it does a second."""

    device: torch.device
    kernel: Kernel
    rehearsal: bool = False
    copy: float = math.inf
    product: float = math.inf

    def seconds(self, actions: list[Callable[[], Any]]) -> float:
        """Seconds of one of `actions`, which do the same to different memory: the median over replays of them all."""
        for action in actions:
            action()
        if self.rehearsal:
            began = time.perf_counter()
            actions[0]()
            return time.perf_counter() - began
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for action in actions:
                action()
        taken = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize(self.device)
            taken.append(start.elapsed_time(end) / 1e3 / len(actions))
        return median(taken)

    def copies(self, nbytes: int) -> int:
        """How many weights of `nbytes` to go through in turn, so that none is found in the cache."""
        if self.rehearsal:
            return 1
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        return max(1, min(16, math.ceil(4 * cache / nbytes)))


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table, write the JSON; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=420.0, help="stop measuring after this long")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="comma-separated")
    parser.add_argument("--tokens", type=numbers, default=TOKENS, help="tokens per product, comma-separated")
    parser.add_argument("--no-model", action="store_true", help="leave out the whole model")
    parser.add_argument("--json", type=Path, help="write all that was measured here")
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU, with the reference kernel")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.schemes.split(",") if name not in SCHEMES]
    if unknown:
        parser.error(f"--schemes: {unknown[0]!r} is not one of {', '.join(SCHEMES)}")
    if given.dry_run:
        card = Card(torch.device("cpu"), reference, rehearsal=True)
    elif torch.cuda.is_available() and torch.version.hip is None:
        card = Card(torch.device("cuda", torch.cuda.current_device()), CudaKernel(DTYPE))
    else:
        print("gpu_check: torch sees no NVIDIA GPU: run it where there is one, or with --dry-run", file=sys.stderr)
        return NO_GPU
    told = measure(card, given)
    show(told)
    if given.json:
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    wrong = [row for row in told["products"] + told["attention"] if row["parity_db"] < PARITY_DB]
    for row in wrong:
        print(f"WRONG: {row['name']} with {row['tokens']} tokens: {row['parity_db']:.1f} dB", file=sys.stderr)
    for name, reason in told["failed"].items():
        print(f"FAILED: {name}: {reason}", file=sys.stderr)
    return WRONG if wrong or told["failed"] else 0


def numbers(text: str) -> tuple[int, ...]:
    """The whole numbers of a list such as 1,4,16. Raises ValueError, which argparse reports."""
    return tuple(int(word) for word in text.split(","))


def measure(card: Card, given: argparse.Namespace) -> dict[str, Any]:
    """Everything, as JSON types."""
    began, card = time.monotonic(), replace(card, **limits(card))
    end = began + given.seconds
    jobs = product_rows(card, given.schemes.split(","), given.tokens)
    told: dict[str, Any] = {
        "card": "rehearsal on the CPU" if card.rehearsal else torch.cuda.get_device_name(card.device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "copy_gbs": card.copy / 1e9,
        "product_tflops": card.product / 1e12,
        "skipped": [],
        "failed": {},
    }
    told["products"] = list(within(began + SHARE * given.seconds, told, jobs))
    told["attention"] = list(within(end, told, attention_rows(card)))
    told["model"] = [] if given.no_model else list(within(end, told, model_rows(card)))
    return told


def within(end: float, told: dict[str, Any], jobs: Iterator[Job]) -> Iterator[Row]:
    """The row of each job until `end` on the monotonic clock; `told` keeps the names of those skipped and failed."""
    for name, job in jobs:
        if time.monotonic() > end:
            told["skipped"].append(name)
            continue
        try:
            yield {"name": name, **job()}
        except (RuntimeError, ValueError, InputError) as error:
            told["failed"][name] = " ".join(str(error).split())


def limits(card: Card) -> dict[str, float]:
    """What the card itself can do: bytes per second of a copy, operations per second of a product."""
    size, side = (1 << 20, 128) if card.rehearsal else (1 << 30, 8192)
    source = torch.zeros(size, dtype=torch.uint8, device=card.device)
    target = source.clone()
    left, right = (torch.randn(side, side, device=card.device).to(DTYPE) for _ in range(2))
    copying = card.seconds([lambda: target.copy_(source)])
    multiplying = card.seconds([lambda: left @ right])
    return {"copy": 2 * size / copying, "product": 2 * side**3 / multiplying}


def product_rows(card: Card, schemes: list[str], tokens: Iterable[int]) -> Iterator[Job]:
    """A job per number of tokens, scheme and layer."""
    layers = {"tiny": (64, 128)} if card.rehearsal else LAYERS
    for count, scheme, layer in itertools.product(tokens, schemes, layers):
        yield f"{scheme} {layer} x {count}", partial(product_row, card, scheme, layers[layer], count)


def product_row(card: Card, name: str, shape: tuple[int, int], tokens: int) -> Row:
    """One layer under one scheme: parity with the reference, time beside cuBLAS."""
    scheme, (rows, columns) = SCHEMES[name], shape
    stored = random_weight(scheme, shape, card.device)
    x = torch.randn(tokens, columns, device=card.device).to(DTYPE)
    nbytes = sum(tensor.nbytes for tensor in stored.values())
    prepared = [
        card.kernel.prepare({suffix: tensor.clone() for suffix, tensor in stored.items()}, scheme, card.device)
        for _ in range(card.copies(nbytes))
    ]
    want = reference.matmul(x.float(), reference.prepare(stored, scheme, card.device))
    parity = decibels(card.kernel.matmul(x, prepared[0]), want)
    taken = card.seconds([partial(card.kernel.matmul, x, one) for one in prepared])
    dense = [torch.randn(shape, device=card.device).to(DTYPE) for _ in range(card.copies(2 * rows * columns))]
    beside = card.seconds([partial(F.linear, x, one) for one in dense])
    moved, operations = nbytes + x.nbytes + 2 * tokens * rows, 2 * tokens * rows * columns
    told = {"scheme": name, "tokens": tokens, "shape": list(shape), "parity_db": parity}
    return told | figures(card, taken, beside, moved, operations)


def attention_rows(card: Card) -> Iterator[Job]:
    """A job per batch and cache type."""
    for (sequences, held), int8 in itertools.product(((2, 70),) if card.rehearsal else ATTENTION, (False, True)):
        name = f"attention {sequences} x {held} {'int8' if int8 else 'bf16'}"
        yield name, partial(attention_row, card, sequences, held, int8)


def attention_row(card: Card, sequences: int, held: int, int8: bool) -> Row:
    """Decode attention over a paged cache: parity with torch's over the same numbers, and time beside it."""
    heads = launch.Heads(*((4, 2, 16) if card.rehearsal else HEADS), int8)
    limit = math.ceil(held / PAGE)
    cache, (keys, values) = random_cache(card.device, heads, sequences, held)
    query = torch.randn(sequences, heads.query, heads.width, device=card.device).to(DTYPE)

    def dense(key: Tensor = keys, value: Tensor = values) -> Tensor:
        return F.scaled_dot_product_attention(query[:, :, None], key, value, enable_gqa=True)[:, :, 0]

    ours = Attention(heads, launch.Scores(heads.width**-0.5), CudaKernel(DTYPE))
    attend = dense if card.rehearsal else lambda: ours(query, cache)
    want = F.scaled_dot_product_attention(query[:, :, None].float(), keys.float(), values.float(), enable_gqa=True)
    parity = decibels(attend(), want[:, :, 0])
    taken, beside = card.seconds([attend]), card.seconds([dense])
    moved = 2 * sequences * limit * PAGE * heads.key * (heads.width * (1 if int8 else 2) + (4 if int8 else 0))
    operations = 4 * sequences * heads.query * held * heads.width
    return {"tokens": sequences, "parity_db": parity} | figures(card, taken, beside, moved, operations)


def model_rows(card: Card) -> Iterator[Job]:
    """A job per batch: the model is compressed and loaded once, by the first that runs."""
    models: list[Any] = []
    size, batches = ("tiny", (1, 2)) if card.rehearsal else ("1.1B", BATCHES)
    for batch in batches:
        yield f"decode {size} W4A16, batch {batch}", partial(model_row, card, models, batch)


def model_row(card: Card, models: list[Any], batch: int) -> Row:
    """Tokens per second of a whole compressed model and of the same in bfloat16, one decode step behind CONTEXT."""
    if not models:
        models += compressed_and_dense(card)
    steps = [decode_step(card, model, batch) for model in models]
    taken, beside = (card.seconds([step]) for step in steps)
    told = {"tokens": batch, "tokens_per_s": batch / taken, "kernels": sorted(set(models[0].model.kernels.values()))}
    return told | figures(card, taken, beside, models[0].weight_bytes, 0)


@dataclass(frozen=True)
class Loaded:
    """A model, and the bytes of its weights but for the embedding: what a decode step reads."""

    model: Any
    weight_bytes: int


def compressed_and_dense(card: Card) -> list[Loaded]:
    """A random Llama written to disk, compressed by the pipeline, and both loaded by the runtime."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from compress.checkpoint import open_checkpoint
    from compress.pipeline import RunOptions, run
    from compress.recipe import parse
    from compress.runtime.load import load_model

    config = LlamaConfig(**(SMALL if card.rehearsal else MODEL), tie_word_embeddings=False)
    group = 32 if card.rehearsal else 64
    with tempfile.TemporaryDirectory() as work:
        source, output = Path(work) / "source", Path(work) / "W4A16"
        with torch.device(card.device):
            LlamaForCausalLM(config).to(DTYPE).save_pretrained(source)
        stage = {"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": group, "search": "minmax"}}
        document = {"version": 1, "model": str(source), "output": str(output), "stages": [stage]}
        run(parse(document, "gpu_check"), RunOptions(device=card.device.type), Quiet())
        loaded = []
        for folder in (output, source):
            tensors = open_checkpoint(folder).tensors
            read = sum(info.nbytes for name, info in tensors.items() if "embed_tokens" not in name)
            loaded.append(Loaded(load_model(folder, card.device, DTYPE), read))
    return loaded


class Quiet:
    """An observer of the pipeline that looks away."""

    def event(self, kind: str, /, **fields: Any) -> None:
        """Take in one event."""


def decode_step(card: Card, loaded: Loaded, batch: int) -> Callable[[], Tensor]:
    """A step that decodes one token per sequence, always at the same place, as a graph repeats it."""
    context = 8 if card.rehearsal else CONTEXT
    network, vocabulary = loaded.model.network, loaded.model.config.vocab_size
    with torch.inference_mode():
        cache = network.new_cache(batch, context + 1)
        network.hidden(torch.randint(vocabulary, (batch, context), device=card.device), cache)
    token = torch.randint(vocabulary, (batch, 1), device=card.device)

    def step() -> Tensor:
        cache.length = context
        # Tables are made on the device, since nothing may be copied there while a graph is captured.
        with torch.inference_mode(), torch.device(card.device):
            return network.logits(network.hidden(token, cache)[:, -1])

    return step


def random_weight(scheme: Scheme, shape: tuple[int, int], device: torch.device) -> dict[str, Tensor]:
    """Random stored tensors of a weight [N, K], by suffix."""
    (rows, columns), grid = shape, scheme.grid
    scale = (torch.rand(rows, grid.groups(columns), device=device) + 0.5).div(grid.maximum * columns**0.5).to(DTYPE)
    low, high = (-99, 99) if grid.bits == FLOAT_BITS else (grid.minimum, grid.maximum + 1)
    q = torch.randint(low, high, shape, device=device).to(DTYPE if grid.bits == FLOAT_BITS else torch.int8)
    mask = None if scheme.pattern is None else keep_largest(torch.rand(shape, device=device), scheme.pattern)
    q = q if mask is None else q.masked_fill(~mask, 0)
    if scheme.threshold is None:
        return format_named(scheme.format).pack(Quantized(q, scale, mask=mask), grid)
    kept = torch.arange(OUTLIERS, dtype=torch.int32, device=device) * (columns // OUTLIERS)
    q[:, kept.long()] = 0
    values = torch.randn(rows, OUTLIERS, device=device).div(columns**0.5).to(DTYPE)
    stored = Quantized(q, scale, outlier_columns=kept, outlier_weight=values)
    return format_named(scheme.format).pack(stored, grid)


Pair = tuple[Tensor, Tensor]


def random_cache(device: torch.device, heads: launch.Heads, sequences: int, held: int) -> tuple[PagedCache, Pair]:
    """A paged cache, and its keys and values [B, h, held, d] in bfloat16 as torch wants them."""
    limit = math.ceil(held / PAGE)
    table = torch.randperm(sequences * limit, device=device).to(torch.int32).view(sequences, limit)
    lengths = torch.full((sequences,), held, dtype=torch.int32, device=device)
    pages = [torch.randn(sequences * limit, heads.key, PAGE, heads.width, device=device).to(DTYPE) for _ in range(2)]
    cache = PagedCache(*pages, table, lengths)
    if heads.int8:
        steps = [page.float().abs().amax(-1) / 127 for page in pages]
        rounded = [
            (page.float() / step[..., None]).round().to(torch.int8) for page, step in zip(pages, steps, strict=True)
        ]
        cache = PagedCache(*rounded, table, lengths, *steps)
        pages = [(q.float() * step[..., None]).to(DTYPE) for q, step in zip(rounded, steps, strict=True)]
    flat = [page[table.long()].transpose(1, 2).flatten(2, 3)[:, :, :held].contiguous() for page in pages]
    return cache, (flat[0], flat[1])


def decibels(got: Tensor, want: Tensor) -> float:
    """Signal to noise ratio of `got`; -inf where it is not finite."""
    noise = (got.double() - want.double()).square().sum()
    ratio = float(10 * torch.log10(want.double().square().sum() / noise.clamp(min=1e-300)))
    return ratio if math.isfinite(ratio) else -math.inf


def figures(card: Card, taken: float, beside: float, moved: int, operations: int) -> Row:
    """Time, bandwidth, rate, the larger of their shares of what the card can do; and torch's time `beside` ours."""
    share = max(moved / taken / card.copy, operations / taken / card.product)
    rates = {"gbs": moved / taken / 1e9, "tflops": operations / taken / 1e12, "share": share}
    return {"us": taken * 1e6, **rates, "torch_us": beside * 1e6, "speedup": beside / taken}


def show(told: dict[str, Any]) -> None:
    """One line per scheme and number of tokens over all layers, per attention and per batch of the model."""
    print(f"{told['card']}: {told['copy_gbs']:.0f} GB/s copied, {told['product_tflops']:.0f} TFLOP/s in bfloat16")
    print(f"{'':30} {'tokens':>6} {'parity':>7} {'us':>9} {'GB/s':>7} {'TFLOP/s':>8} {'of limit':>8} {'x torch':>8}")
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in told["products"] + told["attention"] + told["model"]:
        groups.setdefault((row.get("scheme", row["name"]), row["tokens"]), []).append(row)
    for (name, tokens), rows in groups.items():
        parity = f"{min(row['parity_db'] for row in rows):.1f}" if "parity_db" in rows[0] else "-"
        keys = ("us", "gbs", "tflops", "share", "speedup")
        us, gbs, tflops, share, speedup = (geometric_mean([max(row[key], 1e-9) for row in rows]) for key in keys)
        rates = f"{us:9.1f} {gbs:7.0f} {tflops:8.1f} {share:8.1%} {speedup:8.2f}"
        print(f"{name:30} {tokens:6} {parity:>7} {rates}")
    for row in told["model"]:
        print(f"{row['name']}: {row['tokens_per_s']:.0f} tokens/s with {', '.join(row['kernels'])}")
    for name in told["skipped"]:
        print(f"out of time, not measured: {name}")


if __name__ == "__main__":
    sys.exit(main())
