"""The whole evaluation on a tiny model: figures that can be checked another way, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import InputError
from compress.eval.run import Request, evaluate, publish
from tests.eval.compressed import compress_folder
from tests.tiny import byte_tokenizer, write_model


def quick(checkpoint: Path, text: Path, **changes: Any) -> Request:
    return replace(Request(checkpoint, None, (text,), context=64, limit=256, seconds=0.1), **changes)


def test_perplexity_is_that_of_transformers(tiny_llama: Path, tiny_text: Path) -> None:
    from transformers import AutoModelForCausalLM

    found = evaluate(quick(tiny_llama, tiny_text))["quality"]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    ids = torch.tensor(byte_tokenizer()(tiny_text.read_text(), add_special_tokens=False)["input_ids"][:256]).view(4, 64)
    with torch.inference_mode():
        loss = model(input_ids=ids, labels=ids).loss.double()
    assert found["ppl"] == pytest.approx(loss.exp().item(), rel=1e-5)
    # One token is one byte here.
    assert found["bits_per_byte"] == pytest.approx(loss.item() / torch.log(torch.tensor(2.0)).item(), rel=1e-5)
    assert (found["tokens"], found["ppl_ratio"]) == (252, None)


def test_a_report_against_the_baseline_is_whole(report: dict[str, Any]) -> None:
    quality = report["quality"]
    assert quality["ppl_ratio"] == pytest.approx(quality["ppl"] / quality["ppl_baseline"], rel=1e-9)
    assert 0 < quality["kl_median"] <= quality["kl_p99"] <= quality["kl_max"]
    assert sum(quality["kl_histogram"]["counts"]) == quality["tokens"] == 630
    assert 0.5 < quality["top1_agreement"] < 1
    assert report["size"]["bytes"] < report["size"]["bytes_baseline"]
    assert [row["phase"] for row in report["speed"]] == ["prefill", "decode"]
    assert all(row["tokens_per_s"] > 0 and row["tokens_per_s_baseline"] > 0 for row in report["speed"])
    assert report["speed"][1]["kernel"].keys() >= {"pack-quantized"}
    assert 1e8 < report["memory"]["peak_rss"] < 1e11
    assert report["skipped"] == [{"name": "lm_head", "reason": "left alone"}]
    assert [gate["passed"] for gate in report["gates"]] == [True, False]
    told = "\n".join(report["notes"])
    assert "model: weights of a test" in told
    assert "calibration: source self, samples 2, seqlen 64, seed 0\ncalibration: a test" in told


def test_a_model_against_itself(tiny_llama: Path, tiny_text: Path) -> None:
    quality = evaluate(quick(tiny_llama, tiny_text, baseline=tiny_llama))["quality"]
    assert (quality["ppl_ratio"], quality["kl_max"], quality["top1_agreement"]) == (1.0, 0.0, 1.0)


def test_without_a_text_only_quality_is_null_and_the_report_says_so(packed: Path) -> None:
    found = evaluate(Request(packed, gates=("ppl < 9", "bits_per_weight < 5"), seconds=0.1))
    assert set(found["quality"].values()) == {None}
    assert "quality: not measured, since no text was given" in found["notes"]
    assert [gate["passed"] for gate in found["gates"]] == [False, True]


def test_a_padded_vocabulary_is_cut_and_noted(tiny_llama: Path, tiny_text: Path, tmp_path: Path) -> None:
    wide = write_model(tmp_path / "wide", vocab_size=320)
    found = evaluate(quick(wide, tiny_text, baseline=tiny_llama))
    assert found["quality"]["kl_mean"] is not None
    assert any("over the first 288 tokens, since the vocabularies have 320 and 288" in note for note in found["notes"])


def test_tokenizers_that_disagree_are_refused(tiny_llama: Path, tiny_text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_llama, other)
    document = json.loads((other / "tokenizer.json").read_text())
    ids = document["model"]["vocab"]
    ids["a"], ids["e"] = ids["e"], ids["a"]
    (other / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match="tokenizer reads the text differently") as caught:
        evaluate(quick(tiny_llama, tiny_text, baseline=other))
    assert str(other) in str(caught.value)


def test_a_broken_model_is_reported_not_hidden(tiny_llama: Path, tiny_text: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = compress_folder(tiny_llama, tmp_path / "broken", "W4A16", 32)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = evaluate(quick(folder, tiny_text, gates=("ppl < 1e9",)))
    assert found["quality"]["ppl"] is None and not found["gates"][0]["passed"]
    assert "quality.ppl (nan)" in found["notes"][-1]


def test_wrong_gates_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no figure is called 'pplx'"):
        evaluate(Request(tmp_path / "none", gates=("pplx < 1",)))


def test_reports_are_published_whole(report: dict[str, Any], tmp_path: Path) -> None:
    files = publish(report, tmp_path / "new" / "folder")
    assert sorted(file.name for file in (tmp_path / "new" / "folder").iterdir()) == sorted(file.name for file in files)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="give a folder that can be written") as caught:
        publish(report, tmp_path / "file")
    assert str(caught.value).startswith(f"{tmp_path / 'file'}: ")  # no flag: `lmpress run` has none for it
