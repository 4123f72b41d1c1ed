"""Layer rows: manifest, log and runtime brought together; outlier activations counted on the text alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.eval.layers import kernels_by_format, layer_rows, logged_seconds
from compress.eval.run import Request, evaluate
from compress.eval.size import measure_size
from compress.eval.subject import open_stored, open_subject
from compress.runtime.load import Execution
from tests.eval.compressed import compress_folder

NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")


def test_rows_join_manifest_and_runtime(packed: Path) -> None:
    subject = open_subject(packed, "cpu")
    stored, kernels = subject.stored, subject.model.kernels
    rows = layer_rows(stored, measure_size(stored.checkpoint, stored.schemes), kernels, {})
    assert [row["name"] for row in rows] == [name for name in stored.schemes]
    assert {row["kernel"].partition("-")[0] for row in rows} == {"cpu"}
    assert all(row["method"] == "rtn" and row["error_db"] >= 20 for row in rows)
    assert all(row["bits_per_weight"] == pytest.approx(4.5, abs=0.07) for row in rows)
    assert kernels_by_format(kernels, stored) == {"pack-quantized": rows[0]["kernel"], "dense": rows[0]["kernel"]}


def test_a_checkpoint_of_another_tool_gives_what_its_config_says(packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "foreign"
    shutil.copytree(packed, folder)
    (folder / "lmpress.json").unlink()
    stored = open_stored(folder)
    rows = layer_rows(stored, measure_size(stored.checkpoint, stored.schemes), {}, {})
    assert len(rows) == 14 and {row["kernel"] for row in rows} == {None}
    assert all(row["scheme"] == "W4A16" and "method" not in row for row in rows)


def test_seconds_come_from_the_log_beside_the_folder(tmp_path: Path) -> None:
    events: list[Any] = [
        {"kind": "started", "blocks": 2},
        {"kind": "block", "name": "b", "seconds": 9.0, "layers": [{"name": "b.q", "seconds": 1.0}, {"name": "b.k"}]},
        {"kind": "block", "name": "b", "seconds": 9.0, "layers": [{"name": "b.q", "seconds": 2.0}]},
        [1],
    ]
    lines = [json.dumps(event) for event in events] + ['{"kind": "block", "lay']
    (tmp_path / "out.log.jsonl").write_text("\n".join(lines))
    assert logged_seconds(tmp_path / "out") == {"b.q": 2.0}
    assert logged_seconds(tmp_path / "other") == {}


def test_missed_outliers_are_counted_on_the_text_alone(tiny_llama: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Without outlier columns every activation over 6 is missed; the oracle sees the same inputs through hooks."""
    folder = compress_folder(tiny_llama, tmp_path / "int8", "LLM_INT8")
    report = evaluate(Request(folder, texts=(tiny_text,), context=64, limit=128, seconds=0.1))
    found = {row["name"]: row["outlier_misses"] for row in report["layers"]}
    windows = 128 // 64
    assert all(miss["seen"] == windows * 63 * (128 if "down" in name else 64) for name, miss in found.items())
    subject = open_subject(folder, "cpu", Execution("reference"))
    name = "model.layers.0.mlp.down_proj"
    over: list[int] = []
    module = subject.model.network.get_submodule(name)  # type: ignore[attr-defined]
    module.register_forward_pre_hook(lambda _, inputs: over.append(int((inputs[0].abs() >= 6).sum())))
    text = torch.tensor(subject.tokenizer(tiny_text.read_text(), add_special_tokens=False)["input_ids"])
    for start in (0, 64):
        subject.model.hidden(text[None, start : start + 63])
    assert found[name]["over"] == sum(over)
