"""Calibration tokens: read without a trace, or written by the model on the device that the run works on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.checkpoint.reader import open_checkpoint
from compress.errors import InputError
from compress.recipe import Recipe, parse
from compress.runtime import load
from compress.texts import fingerprint
from compress.tokens import calibration_tokens

CPU = torch.device("cpu")


def recipe(model: Path, source: str, samples: int = 2, seqlen: int = 16) -> Recipe:
    calibration = {"source": source, "samples": samples, "seqlen": seqlen}
    stages = [{"quantize": {"method": "gptq", "scheme": "W4A16"}}]
    return parse({"version": 1, "model": str(model), "calibration": calibration, "stages": stages}, "recipe.yaml")


def test_a_named_text_is_read_and_nothing_is_created(tiny_llama: Path, tiny_text: Path, tmp_path: Path) -> None:
    source, work = open_checkpoint(tiny_llama), tmp_path / "out.partial" / "work"
    tokens = calibration_tokens(recipe(tiny_llama, str(tiny_text)), source, work, CPU)
    assert tokens.ids.shape == (2, 16) and tokens.sha256 == fingerprint(tokens.ids)
    with pytest.raises(InputError, match=r"are less than one sequence"):
        calibration_tokens(recipe(tiny_llama, str(tiny_text), seqlen=10**6), source, work, CPU)
    assert list(tmp_path.iterdir()) == []


def test_self_is_written_on_the_device_and_kept(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, work = open_checkpoint(tiny_llama), tmp_path / "out.partial" / "work"
    devices = []

    def load_model(folder: Path, device: torch.device) -> Any:
        devices.append(device)
        return real(folder, "cpu")

    real = load.load_model
    monkeypatch.setattr(load, "load_model", load_model)
    wish = torch.device("meta")  # a device that nothing falls back to
    tokens = calibration_tokens(recipe(tiny_llama, "self"), source, work, wish)
    again = calibration_tokens(recipe(tiny_llama, "self"), source, work, wish)
    assert devices == [wish] * 2 and not work.parent.exists(), "nothing is kept where no output was begun"
    work.parent.mkdir()
    for _ in range(2):
        again = calibration_tokens(recipe(tiny_llama, "self"), source, work, wish)
    assert devices == [wish] * 3 and torch.equal(tokens.ids, again.ids)
    assert [file.name for file in work.iterdir()] == ["calibration.safetensors"]
