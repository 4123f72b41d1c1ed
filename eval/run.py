"""Evaluate a checkpoint: load it, read the texts, time it, and put everything into one report."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from compress.errors import InputError
from compress.eval import memory, report, speed
from compress.eval.gates import check_gates, parse_gate
from compress.eval.host import host, versions
from compress.eval.layers import kernels_by_format, layer_rows
from compress.eval.quality import Progress, measure_losses, quality_block
from compress.eval.size import Size, bytes_read_per_token, kv_bytes_per_token, measure_size
from compress.eval.subject import Subject, open_subject
from compress.eval.text import Windows, cut_windows

PEAK = "of the whole process with the compressed model alone in it, before a baseline was loaded"


@dataclass(frozen=True)
class Request:
    """What to evaluate. context: tokens per window. limit: most tokens of text. seconds: about how long to time for."""

    checkpoint: Path
    baseline: Path | None = None
    texts: tuple[Path, ...] = ()
    context: int = 512
    limit: int | None = None
    gates: tuple[str, ...] = ()
    device: str = "cpu"
    seconds: float = 12.0


def quiet(stage: str, done: int, total: int) -> None:
    """The progress callback that shows nothing."""


def evaluate(request: Request, progress: Progress = quiet) -> dict[str, Any]:
    """The report of `request`. Raises InputError for what cannot be read, run or compared; wrong gates come first."""
    gates = [parse_gate(expr) for expr in request.gates]
    peak_before = memory.peak_resident_bytes()
    subject = open_subject(request.checkpoint, request.device)
    windows = _windows(request, subject)
    peaks = _peaks_alone(subject, windows)
    baseline = None if request.baseline is None else open_subject(request.baseline, request.device)
    notes = describe(subject, baseline, windows)
    notes.append(
        f"peak_rss: {PEAK if peaks['peak_rss'] > peak_before else 'an upper bound, reached before this evaluation'}"
    )
    if baseline is not None and windows is not None:
        notes += compare_vocabularies(request, subject, baseline, windows)
    size = measure_size(subject.checkpoint, subject.schemes)
    misses_before = subject.model.outlier_misses()
    quality: dict[str, Any] = {}
    if windows is not None:
        losses = measure_losses(subject.model, baseline.model if baseline else None, windows, progress)
        quality = quality_block(losses, windows)
    layers = layer_rows(subject, size, misses_before if windows else None)
    bandwidth = speed.memory_bandwidth(subject.model.device)
    built = report.build(
        {
            "model": str(request.checkpoint),
            "baseline": str(request.baseline) if request.baseline else None,
            "recipe_sha256": subject.manifest.recipe_sha256 if subject.manifest else None,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "host": host(subject.model.device, bandwidth),
            "size": _size_block(subject, baseline, size),
            "quality": quality,
            "speed": _speed(request, (subject, baseline), size, bandwidth, windows),
            "memory": peaks,
            "layers": layers,
            "fallbacks": subject.manifest.fallbacks if subject.manifest else [],
            "skipped": subject.manifest.skipped if subject.manifest else [],
            "notes": notes,
        }
    )
    built["gates"] = check_gates(gates, built)
    return report.without_infinities(built)


def describe(subject: Subject, baseline: Subject | None, windows: Windows | None) -> list[str]:
    """What a reader must know to judge the figures: origins of weights, calibration, engine, and what was left out."""
    origins: dict[str, list[str]] = {}
    for role, one in (("model", subject), ("baseline", baseline)):
        if one is not None:
            for note in (one.checkpoint.config.get("lmpress_note", ""), *one.model.notes):
                origins.setdefault(str(note), []).append(role)
    notes = [f"{' and '.join(roles)}: {note}" for note, roles in origins.items() if note]
    calibration = subject.manifest.calibration if subject.manifest else None
    if calibration:
        told = ", ".join(f"{key} {value}" for key, value in calibration.items() if key not in ("notes", "sha256"))
        notes += [f"calibration: {told}", *(f"calibration: {note}" for note in calibration.get("notes", ()))]
    if windows is None:
        notes.append("quality: not measured, since no --text was given")
    elif baseline is None:
        notes.append("divergence: not measured, since no --baseline was given")
    return notes


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


def publish(built: dict[str, Any], folder: Path) -> list[Path]:
    """Write report.json, report.md and report.html into `folder`. Raises InputError where it cannot be written."""
    from compress.eval.render_html import report_page
    from compress.eval.render_markdown import report_markdown

    texts = {
        "report.json": report.to_json(built),
        "report.md": report_markdown(built),
        "report.html": report_page(built),
    }
    return write_files(folder, texts)


def write_files(folder: Path, texts: dict[str, str]) -> list[Path]:
    """Write each text into `folder` under its name, replacing a file only once its successor is complete."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            partial = folder / f".{name}.partial"
            partial.write_text(text, encoding="utf-8")
            partial.replace(folder / name)
    except OSError as error:
        raise InputError(f"--report {folder}: {error.strerror}: give a folder that can be written") from None
    return [folder / name for name in texts]


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
    request: Request, subjects: tuple[Subject, Subject | None], size: Size, bandwidth: float, windows: Windows | None
) -> list[dict[str, Any]]:
    subject = subjects[0]
    paces = speed.measure_pace([one.model for one in subjects if one], request.seconds)
    itemsize = subject.model.hidden(torch.zeros(1, 1, dtype=torch.int64)).element_size()
    characters = windows.characters / windows.predicted if windows else None
    rows = speed.speed_rows(paces, bytes_read_per_token(size, itemsize), bandwidth, characters)
    return [row | {"kernel": kernels_by_format(subject)} for row in rows]


def _size_block(subject: Subject, baseline: Subject | None, size: Size) -> dict[str, Any]:
    return {
        "bytes": size.file_bytes,
        "bytes_baseline": measure_size(baseline.checkpoint, baseline.schemes).file_bytes if baseline else None,
        "bits_per_weight": size.bits_per_weight,
        "bits_per_weight_all": size.bits_per_weight_all,
        "kv_bytes_per_token": kv_bytes_per_token(subject.checkpoint, subject.model.config),
    }
