"""Types: mypy over the package as it is installed, with eval/ and recipes/ in their places."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_mypy_is_clean(tmp_path: Path) -> None:
    package = tmp_path / "compress"
    package.mkdir()
    for entry in (ROOT / "compress").iterdir():
        if entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)
    for folder in ("eval", "recipes"):
        (package / folder).symlink_to(ROOT / folder)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "compress"]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), "--no-error-summary"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    if found.returncode or found.stdout or found.stderr:
        pytest.fail(found.stdout + found.stderr, pytrace=False)
