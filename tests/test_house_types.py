"""Types: mypy over the package as it is installed, with eval/ and recipes/ in their places."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The tree that is checked and the cache of what was found lie together, always in the same place: a cache that is
# shared with other runs of mypy, or that knows files under paths that have gone, gives other answers.
PLACE = ROOT / "build" / "types"


def test_mypy_is_clean() -> None:
    package = PLACE / "compress"
    package.mkdir(parents=True, exist_ok=True)
    wanted = {entry.name: entry for entry in (ROOT / "compress").iterdir() if entry.name != "__pycache__"}
    wanted |= {folder: ROOT / folder for folder in ("eval", "recipes")}
    for link in package.iterdir():
        if link.name not in wanted:
            link.unlink()
    for name, target in wanted.items():
        if not (package / name).is_symlink():
            (package / name).symlink_to(target)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "compress"]
    command += ["--cache-dir", str(PLACE / "cache"), "--no-error-summary"]
    found = subprocess.run(command, cwd=PLACE, capture_output=True, text=True, check=False)
    if found.returncode or found.stdout or found.stderr:
        pytest.fail(found.stdout + found.stderr, pytrace=False)
