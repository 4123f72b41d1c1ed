"""Run a recipe again and again, killing it with SIGKILL at random moments, until it has been killed often enough.

`python -m tests.interrupted RECIPE KILLS SEED`: prints how many blocks were finished at each kill. The parent imports
everything and runs nothing, so that each attempt is a fork that starts at once.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from compress.pipeline import RunOptions, run
from compress.recipe import Recipe, load

JOURNAL = "journal.jsonl"


class Quiet:
    """An observer that looks away."""

    def event(self, kind: str, /, **fields: Any) -> None:
        pass


def attempt(recipe: Recipe) -> int:
    """Start the run in a child process; its process id."""
    child = os.fork()
    if child == 0:
        run(recipe, RunOptions(device="cpu"), Quiet())
        os._exit(0)
    return child


def lines_of(journal: Path) -> int:
    """Lines in the journal: one when a run has begun, one more per finished section; 0 before."""
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def main(path: str, kills: int, seed: int) -> None:
    recipe = load(path)
    chance = random.Random(seed)
    began = time.monotonic()
    os.waitpid(attempt(recipe.model_copy(update={"output": f"{recipe.output}-whole"})), 0)
    duration = time.monotonic() - began
    journal = Path(f"{recipe.output}.partial") / JOURNAL
    for _ in range(kills):
        # Some kills fall into the start, some right behind a section, some anywhere in the next ones.
        goal = lines_of(journal) + chance.randint(0, 2)
        child = attempt(recipe)
        while lines_of(journal) < goal:
            time.sleep(0.002)
        time.sleep(chance.uniform(0, duration / 10))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print(lines_of(journal), flush=True)
    _, status = os.waitpid(attempt(recipe), 0)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
