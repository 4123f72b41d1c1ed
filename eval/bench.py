"""The bench: a checkpoint and its baseline timed in turn, strict about the kernels that ran, as a report."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compress.eval import memory, report, speed, timing
from compress.eval.host import host
from compress.eval.layers import layer_rows
from compress.eval.quality import Progress
from compress.eval.run import calibration_notes, config_notes, identity, origins, publish, quiet, size_block
from compress.eval.size import measure_size
from compress.eval.speed import Bench, Workload
from compress.eval.speed_plot import speed_image
from compress.eval.subject import Subject, open_stored
from compress.eval.traffic import cache_bytes, read_bandwidth
from compress.kernels.cpu.threads import available_threads
from compress.runtime.load import DEFAULT, Execution, load_model


@dataclass(frozen=True)
class BenchRequest:
    """What to time, and how. allow_fallback: layers that fell back to the reference kernel are named in the report,
    where they would be an error."""

    checkpoint: Path
    baseline: Path | None = None
    bench: Bench = field(default_factory=Bench)
    allow_fallback: bool = False
    device: str = "cpu"
    execution: Execution = DEFAULT


def run_bench(request: BenchRequest, progress: Progress = quiet) -> dict[str, Any]:
    """The report of `request`, without quality.

    Raises InputError for what cannot be read or run, for sequences that are too long, and for fallbacks that are not
    allowed.
    """
    with speed.torch_threads(_threads(request)):
        subject = _open(request.checkpoint, request)
        # The largest cache of all, with nothing else in the process: what it takes to serve this.
        largest = max(request.bench.batches)
        progress(f"filling a cache at batch {largest}", 0, 1)
        speed.run(subject.model, Workload(largest, request.bench.prompt, 1))
        device = subject.model.device
        peaks = {"peak_rss": memory.peak_resident_bytes(), "peak_device": memory.peak_device_bytes(device)}
        subjects = [subject] if request.baseline is None else [subject, _open(request.baseline, request)]
        bandwidth = read_bandwidth(device, _threads(request))
        rows = timing.bench_rows(subjects, request.bench, bandwidth, progress)
        return _report(request, subjects, rows, {"host": host(device, bandwidth, _threads(request)), "memory": peaks})


def _threads(request: BenchRequest) -> int:
    """How many CPU threads everything is timed on: by default all that the process may use."""
    return request.execution.threads or available_threads()


def _open(folder: Path, request: BenchRequest) -> Subject:
    """The checkpoint in `folder`, ready to be timed; its tokenizer stays where it is."""
    stored = open_stored(folder)
    execution = replace(request.execution, threads=_threads(request))
    if folder == request.baseline:
        execution = replace(execution, kv_cache=None)
    model = load_model(stored.checkpoint, request.device, execution=execution)
    timing.refuse_long(folder, model.config.context_length, request.bench)
    if not request.allow_fallback:
        timing.refuse_fallbacks(folder, model)
    return Subject(stored, model, None)


def _report(
    request: BenchRequest, subjects: list[Subject], rows: list[dict[str, Any]], measured: dict[str, Any]
) -> dict[str, Any]:
    stored, model = subjects[0].stored, subjects[0].model
    size = measure_size(stored.checkpoint, stored.schemes)
    cache = {"kv_bytes_per_token": cache_bytes(subjects[0])}
    told = {
        role: [*config_notes(one.stored), *one.model.notes]
        for role, one in zip(("model", "baseline"), subjects, strict=False)
    }
    largest = max(request.bench.batches)
    return report.build(
        {
            **identity(request.checkpoint, request.baseline, stored, timing.fallbacks_of(subjects)),
            **measured,
            "size": size_block(size, subjects[1].stored if request.baseline else None) | cache,
            "speed": rows,
            "layers": layer_rows(stored, size, model.kernels, {}),
            "notes": [
                *origins(told),
                *calibration_notes(stored),
                "quality: not measured by a bench",
                f"peak_rss: of the whole process with the compressed model alone in it, at batch {largest}",
            ],
        }
    )


def publish_bench(built: dict[str, Any], folder: Path) -> list[Path]:
    """Write the report's files into `folder`, and speed.png with more than one batch size.

    Raises InputError where that cannot be written.
    """
    image = speed_image(built["speed"])
    return publish(built, folder, {"speed.png": image} if image else {})
