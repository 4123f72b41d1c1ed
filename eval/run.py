"""Evaluate a checkpoint: load it, read the texts, time it, and put everything into one report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from compress.errors import InputError
from compress.eval import memory, report, timing
from compress.eval.costs import runtime_costs
from compress.eval.gates import check_gates, parse_gate
from compress.eval.host import host, versions
from compress.eval.layers import layer_rows, misses_since
from compress.eval.quality import Progress, measure_losses, quality_block
from compress.eval.size import Size, kv_bytes_of, measure_size
from compress.eval.sparsity import pruning_notes
from compress.eval.speed import Bench
from compress.eval.subject import Stored, Subject, open_stored, open_subject
from compress.eval.text import Windows, cut_windows
from compress.eval.traffic import cache_bytes, read_bandwidth, threads_of
from compress.runtime.load import DEFAULT, Execution, Model

PEAK = "of the whole process with the compressed model alone in it, before a baseline was loaded"


@dataclass(frozen=True)
class Request:
    """What to evaluate. context: tokens per window. limit: most tokens of text.

    bench: what to time. Without one, a short timing at batch 1 takes about `seconds`.
    """

    checkpoint: Path
    baseline: Path | None = None
    texts: tuple[Path, ...] = ()
    context: int = 512
    limit: int | None = None
    gates: tuple[str, ...] = ()
    device: str = "cpu"
    seconds: float = 12.0
    bench: Bench | None = None
    execution: Execution = DEFAULT


def quiet(stage: str, done: int, total: int) -> None:
    """The progress callback that shows nothing."""


def evaluate(request: Request, progress: Progress = quiet) -> dict[str, Any]:
    """The report of `request`. Raises InputError for what cannot be read, run or compared; wrong gates come first."""
    gates = [parse_gate(expr) for expr in request.gates]
    peak_before = memory.peak_resident_bytes()
    subject = open_subject(request.checkpoint, request.device, request.execution)
    if request.bench is not None:
        timing.refuse_long(request.checkpoint, subject.model.config.context_length, request.bench)
    windows = _windows(request, subject)
    peaks = _peaks_alone(subject, windows)
    exact = replace(request.execution, kv_cache=None)
    baseline = None if request.baseline is None else open_subject(request.baseline, request.device, exact)
    notes = describe(subject, baseline, windows)
    notes.append(
        f"peak_rss: {PEAK if peaks['peak_rss'] > peak_before else 'an upper bound, reached before this evaluation'}"
    )
    if baseline is not None and windows is not None:
        notes += compare_vocabularies(request, subject, baseline, windows)
    size = measure_size(subject.stored.checkpoint, subject.stored.schemes)
    misses_before = subject.model.outlier_misses()
    quality: dict[str, Any] = {}
    costs: list[dict[str, Any]] = []
    if windows is not None:
        losses = measure_losses(subject.model, baseline.model if baseline else None, windows, progress)
        quality = quality_block(losses, windows)
        costs = runtime_costs(subject, windows, progress)
    notes += pruning_notes(subject.stored, quality.get("kl_mean"))
    kernels = subject.model.kernels
    misses = misses_since(misses_before, subject.model) if windows else {}
    threads = threads_of(subject.model)
    bandwidth = read_bandwidth(subject.model.device, threads)
    rows, fallbacks = _speed(request, [subject, baseline] if baseline else [subject], bandwidth, windows, progress)
    built = report.build(
        {
            **identity(request.checkpoint, request.baseline, subject.stored, fallbacks),
            "host": host(subject.model.device, bandwidth, threads),
            "size": size_block(size, baseline.stored if baseline else None)
            | {"kv_bytes_per_token": cache_bytes(subject)},
            "quality": quality,
            "costs": costs,
            "speed": rows,
            "memory": peaks,
            "layers": layer_rows(subject.stored, size, kernels, misses),
            "notes": notes,
        }
    )
    built["gates"] = check_gates(gates, built)
    return report.without_infinities(built)


def report_on_files(folder: Path, baseline: Path) -> dict[str, Any]:
    """The report of a checkpoint that nothing is measured on: what its files and those of `baseline` say.

    No weight is read. Raises InputError for a folder that is broken.
    """
    stored, source = open_stored(folder), open_stored(baseline)
    size = measure_size(stored.checkpoint, stored.schemes)
    return report.build(
        {
            **identity(folder, baseline, stored),
            "size": size_block(size, source) | {"kv_bytes_per_token": kv_bytes_of(stored.checkpoint)},
            "layers": layer_rows(stored, size, {}, {}),
            "notes": [
                *origins({"model": config_notes(stored), "baseline": config_notes(source)}),
                *calibration_notes(stored),
                "quality, speed and memory: not measured",
            ],
        }
    )


def identity(
    folder: Path, baseline: Path | None, stored: Stored, fallbacks: Sequence[dict[str, str]] = ()
) -> dict[str, Any]:
    """The parts of a report that say what it is about. fallbacks: of the run, beside those that the manifest names."""
    return {
        "model": str(folder),
        "baseline": str(baseline) if baseline else None,
        "recipe_sha256": stored.manifest.recipe_sha256 if stored.manifest else None,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "fallbacks": [*(stored.manifest.fallbacks if stored.manifest else ()), *fallbacks],
        "skipped": stored.manifest.skipped if stored.manifest else [],
        "phases": stored.manifest.phases if stored.manifest else [],
    }


def describe(subject: Subject, baseline: Subject | None, windows: Windows | None) -> list[str]:
    """What a reader must know to judge the figures: origins of weights, engine, calibration, and what was left out."""
    pair = {"model": subject} if baseline is None else {"model": subject, "baseline": baseline}
    notes = origins({role: [*config_notes(one.stored), *runtime_notes(one.model)] for role, one in pair.items()})
    notes += calibration_notes(subject.stored)
    if windows is None:
        notes.append("quality: not measured, since no text was given")
    elif baseline is None:
        notes.append("divergence: not measured, since no baseline was given")
    return notes


def origins(said: dict[str, list[str]]) -> list[str]:
    """A note for each thing `said` about a role, one for both where it is said of both."""
    roles: dict[str, list[str]] = {}
    for role, notes in said.items():
        for note in notes:
            roles.setdefault(note, []).append(role)
    return [f"{' and '.join(named)}: {note}" for note, named in roles.items()]


def config_notes(stored: Stored) -> list[str]:
    """What a checkpoint's config says about its weights."""
    note = stored.checkpoint.config.get("lmpress_note")
    return [str(note)] if note else []


def runtime_notes(model: Model) -> list[str]:
    """What a loaded model says about how it runs."""
    return [*model.notes, *(f"{told['name']}: {told['reason']}: runs on torch operations" for told in model.fallbacks)]


def calibration_notes(stored: Stored) -> list[str]:
    """Which tokens a checkpoint was calibrated on, and what about them deserves a second look."""
    calibration = stored.manifest.calibration if stored.manifest else None
    if not calibration:
        return []
    told = ", ".join(f"{key} {value}" for key, value in calibration.items() if key not in ("notes", "sha256"))
    return [f"calibration: {told}", *(f"calibration: {note}" for note in calibration.get("notes", ()))]


def compare_vocabularies(request: Request, subject: Subject, baseline: Subject, windows: Windows) -> list[str]:
    """Notes on unequal vocabularies. Raises InputError where the two tokenizers read the texts differently."""
    theirs = cut_windows(request.texts, baseline.tokenizer, request.context, request.limit)
    if not torch.equal(windows.tokens, theirs.tokens):
        raise InputError(
            f"--baseline {request.baseline}: its tokenizer reads the text differently, and divergence per token needs "
            "one tokenizer: evaluate each alone, then `lmpress compare` their bits per byte"
        )
    sizes = [one.model.config.vocab_size for one in (subject, baseline)]
    if sizes[0] == sizes[1]:
        return []
    return [f"divergence: over the first {min(sizes)} tokens, since the vocabularies have {sizes[0]} and {sizes[1]}"]


def publish(built: dict[str, Any], folder: Path, images: Mapping[str, bytes] | None = None) -> list[Path]:
    """Write report.json, report.md and report.html into `folder`, and `images` (name -> file) beside them.

    Raises InputError where it cannot be written.
    """
    from compress.eval.render_html import report_page
    from compress.eval.render_markdown import report_markdown

    texts = {
        "report.json": report.to_json(built),
        "report.md": report_markdown(built),
        "report.html": report_page(built),
    }
    return write_files(folder, {**texts, **(images or {})})


def write_files(folder: Path, contents: Mapping[str, str | bytes]) -> list[Path]:
    """Write each text or image into `folder` under its name, replacing a file only once its successor is complete."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            partial = folder / f".{name}.partial"
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
            partial.replace(folder / name)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror}): give a folder that can be written") from None
    return [folder / name for name in contents]


def refuse_unwritable(folder: Path) -> None:
    """Raise InputError where `folder` could not be written, so that it shows before the work and not behind it."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise InputError(f"--report {folder}: {nearest} is no folder to write in: name another")


def _windows(request: Request, subject: Subject) -> Windows | None:
    if not request.texts:
        return None
    return cut_windows(request.texts, subject.tokenizer, request.context, request.limit)


def _peaks_alone(subject: Subject, windows: Windows | None) -> dict[str, Any]:
    """The report's `memory`: peaks with the compressed model alone in the process, after it has run one window."""
    tokens = torch.zeros(1, 64, dtype=torch.int64) if windows is None else windows.tokens[:1, :-1]
    subject.model.logits(subject.model.hidden(tokens)[:, -1])
    return {"peak_rss": memory.peak_resident_bytes(), "peak_device": memory.peak_device_bytes(subject.model.device)}


def _speed(
    request: Request, subjects: list[Subject], bandwidth: float, windows: Windows | None, progress: Progress
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """The report's `speed`, and, where the request names a bench, what fell back to a reference while it ran."""
    if request.bench is not None:
        rows = timing.bench_rows(subjects, request.bench, bandwidth, progress)
        return rows, timing.fallbacks_of(subjects)
    characters = windows.characters / windows.predicted if windows else None
    return timing.short_rows(subjects, request.seconds, bandwidth, characters), []


def size_block(size: Size, baseline: Stored | None) -> dict[str, Any]:
    """The report's `size` but for the key-value cache."""
    return {
        "bytes": size.file_bytes,
        "bytes_baseline": measure_size(baseline.checkpoint, baseline.schemes).file_bytes if baseline else None,
        "bits_per_weight": size.bits_per_weight,
        "bits_per_weight_all": size.bits_per_weight_all,
    }
