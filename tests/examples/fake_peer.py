"""A peer that computes nothing: it notes every call in a file, and dies where it is told to."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "peers"))

from serving import serve  # noqa: E402


class Fake:
    """`name` stands in front of every line that goes to `log`. last: prefills that it survives."""

    def __init__(self, name: str, log: Path, last: int) -> None:
        self.about = {"program": name, "version": "1", "weights": "none", "threads": 1}
        self.log, self.left = log, last

    def prepare(self, batch: int, capacity: int) -> None:
        if not self.left:
            raise SystemExit("out of luck")
        self.left -= 1
        self._note(f"prepare {batch} {capacity}")

    def prefill(self, prompt: int) -> None:
        print("chatter on stdout must not get between the answers")
        self._note(f"prefill {prompt}")

    def step(self) -> None:
        self._note("step")

    def _note(self, what: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{self.about['program']} {what}\n")


if __name__ == "__main__":
    serve(Fake(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
