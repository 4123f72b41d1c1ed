"""The report's speed rows: rates, roofs and kernels; and what counts as a fallback."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from compress.errors import USAGE, InputError
from compress.eval.report import build
from compress.eval.speed import Bench, Runs, Workload
from compress.eval.timing import (
    fallbacks_of,
    model_fallbacks,
    refuse_fallbacks,
    refuse_long,
    refuse_too_long,
    speed_rows,
)
from compress.eval.traffic import Traffic

SIZES = SimpleNamespace(layer_count=1, kv_heads=1, head_dim=1)
# No bytes of cache, so that the sums can be done in one's head.
OURS, THEIRS = (Traffic(cast(Any, SimpleNamespace(config=SIZES)), weights, 0.0) for weights in (100, 400))


def test_rates_are_medians_over_all_sequences_and_bytes_those_of_a_step() -> None:
    ours = Runs(prefill=(2.0, 1.0, 4.0, 2.0, 3.0), decode=(1.0, 4.0, 2.0, 1.0, 3.0))
    theirs = Runs(prefill=(4.0,) * 5, decode=(8.0,) * 5)
    prefill, decode = speed_rows(Workload(4, 10, 8), [ours, theirs], [OURS, THEIRS], bandwidth=1000.0)
    assert (prefill["tokens_per_s"], prefill["tokens_per_s_baseline"]) == (4 * 10 / 2, 4 * 10 / 4)
    assert (decode["tokens_per_s"], decode["tokens_per_s_baseline"]) == (4 * 8 / 2, 4 * 8 / 8)
    assert decode["tokens_per_s_iqr"] == [4 * 8 / 3, 4 * 8 / 1] and decode["tokens_per_s_iqr_baseline"] == [4.0, 4.0]
    # Eight steps of 100 bytes in 2 seconds, of 400 bytes in 8.
    assert (decode["gbs"], decode["bandwidth_share"]) == (400 / 1e9, 0.4)
    assert (decode["gbs_baseline"], decode["bandwidth_share_baseline"]) == (400 / 1e9, 0.4)
    assert (decode["seconds"], decode["seconds_baseline"], prefill["seconds"]) == (2.0, 8.0, 2.0)
    assert prefill["gbs"] is None and prefill["bandwidth_share"] is None
    assert {(row["phase"], row["batch"], row["prompt"], row["new"], row["runs"]) for row in (prefill, decode)} == {
        ("prefill", 4, 10, 0, 5),
        ("decode", 4, 10, 8, 5),
    }
    build({"speed": [prefill, decode]})  # no key that the report does not know


def test_without_a_baseline_its_figures_are_null() -> None:
    rows = speed_rows(Workload(1, 10, 8), [Runs((2.0,), (2.0,))], [OURS], 1000.0, characters_per_token=4.0)
    built = build({"speed": rows})["speed"]
    assert built[1]["chars_per_s"] == 4.0 * built[1]["tokens_per_s"]
    assert all(value is None for row in built for key, value in row.items() if key.endswith("_baseline"))
    assert built[0]["tokens_per_s_iqr"] is None, "one run has no spread"


def loaded(kernels: dict[str, str], fallbacks: list[dict[str, str]] | None = None) -> Any:
    return SimpleNamespace(kernels=kernels, fallbacks=fallbacks or [])


def test_a_layer_on_the_reference_kernel_is_a_fallback() -> None:
    fast, slow = loaded({"a": "cpu-avx2"}), loaded({"a": "cpu-avx2", "b": "reference"})
    assert model_fallbacks(fast) == []
    assert [row["name"] for row in model_fallbacks(slow)] == ["b"]
    both = fallbacks_of([cast(Any, SimpleNamespace(model=slow)), cast(Any, SimpleNamespace(model=slow))])
    assert [row["name"] for row in both] == ["b", "b"]
    assert [row["reason"].endswith(" (in the baseline)") for row in both] == [False, True]


def test_what_the_runtime_names_comes_first() -> None:
    told = {"name": "native kernels", "reason": "no compiler"}
    assert model_fallbacks(loaded({"a": "reference"}, [told]))[0] == told
    refused = loaded({}, [told])
    with pytest.raises(InputError, match="native kernels fell back to plain torch: no compiler"):
        refuse_fallbacks(Path("folder"), refused)


def test_an_error_names_the_first_layers_the_reason_and_the_mend() -> None:
    refuse_fallbacks(Path("folder"), loaded({"a": "cpu-avx2"}))
    with pytest.raises(InputError) as caught:
        refuse_fallbacks(Path("folder"), loaded({name: "reference" for name in "abcde"}))
    said = str(caught.value)
    assert said.startswith("folder: a, b, c and 2 more fell back to plain torch: ")
    assert "'reference'" in said and "lmpress doctor" in said and "--allow-fallback" in said
    assert caught.value.exit_code == 1


def test_sequences_beyond_the_context_are_refused(tiny_llama: Path) -> None:
    refuse_long(Path("folder"), 10, Bench((1,), prompt=6, new=4))
    with pytest.raises(InputError, match="prompt of 7 and 4 new tokens do not fit into the 10") as caught:
        refuse_long(Path("folder"), 10, Bench((1,), prompt=7, new=4))
    assert caught.value.exit_code == USAGE
    refuse_too_long(tiny_llama, Bench((1,), prompt=500, new=12))
    with pytest.raises(InputError, match="the 512 tokens"):
        refuse_too_long(tiny_llama, Bench((1,), prompt=500, new=13))
