"""How sparse a checkpoint's weights are, tensor by tensor, from the weights themselves."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.interop.compressed_tensors import dense_scheme
from compress.checkpoint.quantization_config import stored_shape
from compress.checkpoint.source import dequantized
from compress.eval.subject import Stored, open_stored
from compress.eval.table import NOT_MEASURED, Table, number, percent, storage
from compress.formats import format_named
from compress.formats.grid import FLOAT_BITS
from compress.formats.pattern import Pattern

# Mean KL divergence, nats per token, from which a pruned model is called broken: about 10% more perplexity.
MOST_DIVERGENCE = 0.1
# The shipped recipe that prunes and then wins back what that has cost.
RECOVERY = "recover_sparse24_int4"
# In this order: what is 2:4 is 4:8 as well.
PATTERNS = (Pattern(2, 4), Pattern(4, 8))


def sparsity(folder: Path) -> list[dict[str, Any]]:
    """Per weight matrix: its share of zeros, and the pattern that every group of its columns follows, or None.

    A group follows N:M when at least M - N of its M columns are zero. Reads every weight, one at a time.
    Raises InputError for a broken folder.
    """
    stored = open_stored(folder)
    floats = dequantized(stored.checkpoint, stored.schemes, torch.float32)
    rows = []
    for name, info in floats.tensors.items():
        if name.endswith(".weight") and len(info.shape) == 2:
            weight = floats.read(name)
            zeros = float((weight == 0).float().mean())
            found = next((str(pattern) for pattern in PATTERNS if holds(weight, pattern)), None)
            rows.append({"name": name, "zeros": zeros, "pattern": found})
    return rows


def holds(weight: Tensor, pattern: Pattern) -> bool:
    """Whether no group of columns of `weight` [N, K] has more values than `pattern` keeps."""
    if weight.shape[1] % pattern.of:
        return False
    kept = (weight.unflatten(-1, (-1, pattern.of)) != 0).sum(-1)
    return int(kept.max()) <= pattern.keep


def pruning_notes(stored: Stored, kl_mean: float | None) -> list[str]:
    """What a reader must know of pruned weights: what they take in the words of other loaders, and a loss that is too
    much to ship. kl_mean: mean KL divergence from the baseline, nats, or None where it was not measured."""
    checkpoint = stored.checkpoint
    sparse = {module: scheme for module, scheme in stored.schemes.items() if scheme.pattern is not None}
    if not sparse:
        return []
    codes = dense = checkpoint.nbytes
    for module, scheme in sparse.items():
        own = sum(info.nbytes for name, info in checkpoint.tensors.items() if name.rpartition(".")[0] == module)
        shape = stored_shape(checkpoint, module, scheme)
        floats = FLOAT_BITS // 8 * prod(shape)
        plain = dense_scheme(scheme)
        dense += floats - own
        specs = {} if plain is None else format_named(plain.format).specs(shape, plain.grid, torch.bfloat16)
        codes += (sum(spec.nbytes for spec in specs.values()) or floats) - own
    pattern = next(iter(sparse.values())).pattern
    notes = [
        f"pruned: {len(sparse)} layers to {pattern}, {storage(checkpoint.nbytes)} in all as sparse24, which lmpress "
        f"alone reads; exported as compressed-tensors {storage(codes)}, as dense {storage(dense)}"
    ]
    if kl_mean is not None and kl_mean > MOST_DIVERGENCE:
        trained = stored.manifest is not None and any(row["kind"] == "distill" for row in stored.manifest.phases)
        mend = "train longer or on more text" if trained else f"win it back by distillation (`lmpress run {RECOVERY}`)"
        left = f"a KL divergence of {number(kl_mean)} nats per token is left, over {MOST_DIVERGENCE}"
        notes.append(f"pruned: {left}: {mend} before use, or prune fewer layers")
    return notes


def sparsity_table(rows: list[dict[str, Any]]) -> Table:
    """One row per weight matrix."""
    return Table("Sparsity", ("weight", "zeros", "pattern"), tuple(_row(row) for row in rows))


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["name"].removesuffix(".weight"), percent(row["zeros"]), row["pattern"] or NOT_MEASURED
