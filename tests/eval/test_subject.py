"""What an evaluation opens, and that it opens it once."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress.eval.subject import open_stored, open_subject
from compress.runtime import load


def test_the_headers_are_read_once(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "open_checkpoint", lambda folder: pytest.fail(f"{folder} is opened again"))
    subject = open_subject(packed, "cpu")
    assert len(subject.stored.schemes) == 14 and subject.model.kernels.keys() == {*subject.stored.schemes, "lm_head"}
    assert subject.stored.manifest is not None


def test_a_foreign_checkpoint_has_no_manifest(tiny_llama: Path) -> None:
    stored = open_stored(tiny_llama)
    assert (stored.manifest, stored.schemes) == (None, {})
