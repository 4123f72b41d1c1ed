"""Fixtures that the whole suite shares: tiny random models, the demo model, and the devices that exist."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compress.demo_model import build
from tests.tiny import write_model, write_text

ROOT = Path(__file__).parent.parent
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers in bfloat16. Read only: tests that change it copy it first."""
    return write_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file long enough for a few thousand tokens of the tiny models. Read only."""
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct, built once into build/demo/model by the code behind `lmpress demo-model`. Read only."""
    folder = ROOT / "build" / "demo" / "model"
    build(folder)
    return folder


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device this machine has."""
    return torch.device(request.param)
