"""The runtime's own cost: measured against the same checkpoint without it, and only where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.eval.costs import runtime_costs
from compress.eval.run import Request, evaluate, quiet
from compress.eval.subject import open_subject
from compress.eval.text import Windows
from compress.runtime.load import Execution
from tests.eval.compressed import compress_folder

TOKENS = torch.randint(0, 256, (3, 64), generator=torch.Generator().manual_seed(0))
WINDOWS = Windows("random", TOKENS, 189, 189)


def costs(folder: Path, execution: Execution) -> dict[str, dict[str, Any]]:
    rows = runtime_costs(open_subject(folder, "cpu", execution), WINDOWS, quiet)
    return {row["name"]: row for row in rows}


def test_int8_activations_of_a_weight_only_scheme(packed: Path) -> None:
    """Against an oracle: both models' log-probabilities at once."""
    found = costs(packed, Execution())
    assert found.keys() == {"int8 activations"} and found["int8 activations"]["tokens"] == 189
    fast, exact = (open_subject(packed, "cpu", Execution(kernels)).model for kernels in ("auto", "reference"))
    ours, theirs = (one.logits(one.hidden(TOKENS[:, :-1])).double().log_softmax(-1) for one in (fast, exact))
    want = (theirs.exp() * (theirs - ours)).sum(-1).mean().item()
    assert found["int8 activations"]["kl_mean"] == pytest.approx(want, rel=1e-3) and 0 < want < 0.01


def test_a_narrow_cache_is_a_cost_of_its_own(packed: Path) -> None:
    found = costs(packed, Execution(kv_cache="int8"))
    assert found.keys() == {"int8 activations", "int8 key-value cache"}
    assert 0 < found["int8 key-value cache"]["kl_mean"] < 0.01


def test_what_rounds_nothing_costs_nothing(packed: Path, tiny_llama: Path, tmp_path: Path) -> None:
    assert costs(packed, Execution("reference")) == costs(tiny_llama, Execution()) == {}
    # W8A8 asks for int8 activations itself.
    assert costs(compress_folder(tiny_llama, tmp_path / "int8", "W8A8"), Execution()) == {}


def test_the_report_tells_the_cost_and_the_cache(packed: Path, tiny_text: Path) -> None:
    request = Request(packed, texts=(tiny_text,), context=64, limit=128, seconds=0.1)
    wide = evaluate(request)
    assert [row["name"] for row in wide["costs"]] == ["int8 activations"]
    assert wide["size"]["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    narrow = evaluate(
        Request(packed, texts=(tiny_text,), context=64, limit=128, seconds=0.1, execution=Execution(kv_cache="int8"))
    )
    assert narrow["size"]["kv_bytes_per_token"] == 2 * 2 * 2 * (16 + 4)
