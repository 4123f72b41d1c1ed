"""The report's speed rows: a model and its baseline timed in turn, the bytes they moved, and the kernels that ran."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from compress.checkpoint import open_checkpoint
from compress.errors import USAGE, InputError
from compress.eval.layers import kernels_by_format
from compress.eval.quality import Progress
from compress.eval.size import measure_size
from compress.eval.speed import Bench, Runs, Workload, measure, measure_within, middle
from compress.eval.subject import Subject
from compress.eval.traffic import Traffic, traffic_of
from compress.kernels import reference
from compress.runtime.config import ModelConfig
from compress.runtime.load import Model, known_config

# Layers that an error names one by one.
NAMED = 3


def bench_rows(subjects: Sequence[Subject], bench: Bench, bandwidth: float, progress: Progress) -> list[dict[str, Any]]:
    """Two rows for each batch size of `bench`: the first of `subjects` is reported, the second is its baseline."""
    traffic = [_traffic(subject) for subject in subjects]
    measured = measure([subject.model for subject in subjects], bench.workloads, bench.repeat, progress)
    rows = [
        row
        for workload, runs in zip(bench.workloads, measured, strict=True)
        for row in speed_rows(workload, runs, traffic, bandwidth)
    ]
    return [row | _kernels(subjects) for row in rows]


def short_rows(
    subjects: Sequence[Subject], seconds: float, bandwidth: float, characters_per_token: float | None
) -> list[dict[str, Any]]:
    """Two rows, at batch 1, from a timing that takes about `seconds`."""
    workload, runs = measure_within([subject.model for subject in subjects], seconds)
    traffic = [_traffic(subject) for subject in subjects]
    rows = speed_rows(workload, runs, traffic, bandwidth, characters_per_token)
    return [row | _kernels(subjects) for row in rows]


def refuse_long(folder: Path, context: int, bench: Bench) -> None:
    """Raise InputError where a sequence of `bench` is longer than the `context` that the model was made for."""
    if bench.prompt + bench.new > context:
        raise InputError(
            f"{folder}: a prompt of {bench.prompt} and {bench.new} new tokens do not fit into the {context} tokens "
            "that the model was made for: give a shorter prompt or fewer new tokens",
            USAGE,
        )


def refuse_too_long(folder: Path, bench: Bench) -> None:
    """`refuse_long` for a model that is not loaded, from its config.json; nothing where only transformers knows it."""
    config = known_config(open_checkpoint(folder))
    if isinstance(config, ModelConfig):
        refuse_long(folder, config.context_length, bench)


def fallbacks_of(subjects: Sequence[Subject]) -> list[dict[str, str]]:
    """The report's `fallbacks` of a run: layers of the first of `subjects`, then of the second, the baseline."""
    rows = []
    for subject, where in zip(subjects, ("", " (in the baseline)"), strict=False):
        rows += [{"name": row["name"], "reason": f"{row['reason']}{where}"} for row in model_fallbacks(subject.model)]
    return rows


def model_fallbacks(model: Model) -> list[dict[str, str]]:
    """What of `model` was to run natively and does not, and each layer that the reference kernel multiplies."""
    reason = f"multiplied by the kernel {reference.NAME!r}, since no faster one takes it"
    layers = [{"name": name, "reason": reason} for name, kernel in model.kernels.items() if kernel == reference.NAME]
    return [*model.fallbacks, *layers]


def refuse_fallbacks(folder: Path, model: Model) -> None:
    """Raise InputError that names what of `model` fell back to plain torch first, if anything did, and why."""
    found = model_fallbacks(model)
    if not found:
        return
    first = ", ".join(row["name"] for row in found[:NAMED])
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    raise InputError(
        f"{folder}: {first}{more} fell back to plain torch: {found[0]['reason']}: mend that (`lmpress doctor` shows "
        "what this machine lacks), or time it as it is with --allow-fallback"
    )


def speed_rows(
    workload: Workload,
    runs: Sequence[Runs],
    traffic: Sequence[Traffic],
    bandwidth: float,
    characters_per_token: float | None = None,
) -> list[dict[str, Any]]:
    """The report's `speed` rows of one workload but for kernels: of the compressed model and, second, of a baseline.

    Rates are medians over the runs and count the tokens of all sequences. gbs: what a decoding step reads, over the
    time it takes; prefill reuses what it reads, so it has none.
    """
    rows = []
    for phase in ("prefill", "decode"):
        row: dict[str, Any] = {
            "phase": phase,
            "batch": workload.batch,
            "prompt": workload.prompt,
            "runs": len(runs[0].prefill),
        }
        row["new"] = workload.new if phase == "decode" else 0
        for suffix, taken, moved in zip(("", "_baseline"), runs, traffic, strict=False):
            seconds = taken.prefill if phase == "prefill" else taken.decode
            figures = _rates(workload, phase, seconds, moved.per_step(workload), bandwidth)
            row |= {f"{key}{suffix}": value for key, value in figures.items()}
        if characters_per_token:
            row["chars_per_s"] = row["tokens_per_s"] * characters_per_token
        rows.append(row)
    return rows


def _rates(
    workload: Workload, phase: str, seconds: Sequence[float], bytes_per_step: float, bandwidth: float
) -> dict[str, Any]:
    """What `seconds` of the runs of one phase amount to."""
    steps = workload.new if phase == "decode" else workload.prompt
    tokens = workload.batch * steps
    spread = middle(seconds)
    moved = bytes_per_step * steps / median(seconds) if phase == "decode" else None
    return {
        "tokens_per_s": tokens / median(seconds),
        "tokens_per_s_iqr": [tokens / spread[2], tokens / spread[0]] if spread else None,
        "seconds": median(seconds),
        "gbs": moved / 1e9 if moved else None,
        "bandwidth_share": moved / bandwidth if moved else None,
    }


def _traffic(subject: Subject) -> Traffic:
    return traffic_of(subject.model, measure_size(subject.stored.checkpoint, subject.stored.schemes))


def _kernels(subjects: Sequence[Subject]) -> dict[str, dict[str, str]]:
    """`kernel` and, with a baseline, `kernel_baseline`: format -> the kernels that ran its layers."""
    keys = ("kernel", "kernel_baseline")
    return {
        key: kernels_by_format(subject.model.kernels, subject.stored)
        for key, subject in zip(keys, subjects, strict=False)
    }
