"""`python -m tests.peak RECIPE`: run a recipe and print its peak resident bytes, predicted and seen, as JSON."""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from compress.pipeline import RunOptions, prepare, run
from compress.recipe import load


class Quiet:
    """An observer that looks away."""

    def event(self, kind: str, /, **fields: Any) -> None:
        pass


if __name__ == "__main__":
    recipe = load(sys.argv[1], sys.argv[2:])
    predicted = prepare(recipe).plan.peak_memory
    run(recipe, RunOptions(device="cpu"), Quiet())
    print(json.dumps({"predicted": predicted, "seen": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
