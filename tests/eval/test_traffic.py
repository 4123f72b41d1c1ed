"""Bytes that a step reads, counted by hand, and the bandwidth they are held against."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from compress.eval import traffic
from compress.eval.size import measure_size
from compress.eval.speed import Workload
from compress.eval.subject import open_stored
from compress.eval.traffic import Traffic, read_bandwidth, threads_of, traffic_of
from compress.kernels.cpu.build import Unavailable
from compress.runtime.load import Execution, known_config, load_model
from tests.tiny import write_model

CPU = torch.device("cpu")


def test_each_sequence_reads_its_own_keys_and_values_once_per_step() -> None:
    sizes = SimpleNamespace(layer_count=3, kv_heads=2, head_dim=8)
    moved = Traffic(cast(Any, SimpleNamespace(config=sizes)), weights=1000, cache_item=2.0)
    token = 2 * 3 * 2 * 8 * 2
    # The two steps see 11 and 12 tokens, themselves included.
    assert moved.per_step(Workload(1, 10, 2)) == 1000 + 11.5 * token
    assert moved.per_step(Workload(4, 10, 2)) == 1000 + 4 * 11.5 * token


def test_a_window_bounds_what_its_layers_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "gemma", "gemma3_text", sliding_window=4, num_hidden_layers=3)
    config = known_config(open_stored(folder).checkpoint)
    windows = cast(Any, config).windows
    assert 4 in windows
    seen = sum(10 if window is None else window for window in windows)
    moved = Traffic(cast(Any, SimpleNamespace(config=config)), weights=0, cache_item=4.0)
    assert moved.per_step(Workload(1, 9, 1)) == seen * 2 * cast(Any, config).kv_heads * 16 * 4


def test_reference_weights_count_as_stored_or_in_the_type_they_run_in(packed: Path) -> None:
    stored = open_stored(packed)
    size = measure_size(stored.checkpoint, stored.schemes)
    found = traffic_of(load_model(packed, execution=Execution(kernels="reference")), size)
    linears = sum(module.nbytes for module in size.compressed)
    norms, head = 5 * 64, 288 * 64  # the embedding gives one row only
    assert (found.weights, found.cache_item) == (linears + 4 * (norms + head), 4)


@pytest.mark.parametrize(("kv_cache", "item"), [("f32", 4), ("bf16", 2), ("int8", 1 + 4 / 16)])
def test_native_weights_count_as_they_lie_in_memory(packed: Path, kv_cache: str, item: float) -> None:
    stored = open_stored(packed)
    model = load_model(packed, execution=Execution(kv_cache=kv_cache))
    if model.fallbacks:
        pytest.skip(f"no native kernels here: {model.fallbacks}")
    found = traffic_of(model, measure_size(stored.checkpoint, stored.schemes))
    integers = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 128 * 3)
    least = integers // 2 + integers // 32 * 2 + 288 * 64 * 2
    assert least <= found.weights < 1.5 * least
    assert found.cache_item == item


def test_threads_are_those_that_compute(packed: Path) -> None:
    model = load_model(packed, execution=Execution(threads=3))
    if not model.fallbacks:
        assert threads_of(model) == 3
    reference = load_model(packed, execution=Execution(kernels="reference", threads=3))
    assert threads_of(reference) == torch.get_num_threads()


@pytest.mark.parametrize("native", [True, False])
def test_read_bandwidth_is_bytes_over_the_median_time(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    class Engine:
        def __init__(self, threads: int) -> None:
            if not native:
                raise Unavailable("no compiler")
            assert threads == 2

        def read(self, buffer: torch.Tensor) -> None:
            reads.append(buffer.nbytes)

    times = iter([9.0, 1.0, 2.0, 3.0, 2.0, 2.0, 0.5])

    def timed(action: Any, device: torch.device) -> float:
        action()
        return next(times)

    monkeypatch.setattr(traffic, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(traffic, "Engine", Engine)
    monkeypatch.setattr(traffic, "timed", timed)
    assert read_bandwidth(CPU, 2) == (1 << 20) / 2.0
    assert reads == ([1 << 20] * 8 if native else [])


def test_read_bandwidth_is_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "READ_BYTES", 1 << 24)
    assert 1e8 < read_bandwidth(CPU, 1) < 1e13
