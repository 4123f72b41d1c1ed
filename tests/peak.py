"""`python -m tests.peak RECIPE`: run a recipe and print its peak resident bytes, predicted and seen, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from compress.pipeline import RunOptions, prepare, run
from compress.recipe import load


class Quiet:
    """An observer that looks away."""

    def event(self, kind: str, /, **fields: Any) -> None:
        pass


def peak_resident() -> int:
    """Peak resident bytes of this process alone: getrusage would count its parent's at the fork, too."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


if __name__ == "__main__":
    recipe = load(sys.argv[1], sys.argv[2:])
    predicted = prepare(recipe).plan.peak_memory
    run(recipe, RunOptions(device="cpu"), Quiet())
    print(json.dumps({"predicted": predicted, "seen": peak_resident()}))
