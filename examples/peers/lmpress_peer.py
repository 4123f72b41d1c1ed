"""lmpress as a peer of examples/side_by_side_speed.py."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

# As the command itself does, before torch is imported: idle threads soon sleep.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

import torch  # noqa: E402
from serving import serve  # noqa: E402

from compress import __version__  # noqa: E402
from compress.runtime.load import Execution, load_model  # noqa: E402


class Lmpress:
    """A checkpoint folder in the bundled runtime."""

    def __init__(self, folder: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = load_model(folder, execution=Execution(threads=threads))
        kernels = sorted(set(self.model.kernels.values())) or ["torch"]
        weights = f"{folder.name} by {', '.join(kernels)}"
        self.about = {"program": "lmpress", "version": __version__, "weights": weights, "threads": threads}

    def prepare(self, batch: int, capacity: int) -> None:
        self.cache = self.model.new_cache(batch, capacity)
        self.batch = batch

    def prefill(self, prompt: int) -> None:
        self._next_logits(torch.arange(prompt).remainder(97).expand(self.batch, -1))

    def step(self) -> None:
        self._next_logits(torch.zeros(self.batch, 1, dtype=torch.int64))

    def _next_logits(self, tokens: Any) -> None:
        self.model.logits(self.model.hidden(tokens, self.cache)[:, -1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    serve(Lmpress(arguments.model, arguments.threads))
