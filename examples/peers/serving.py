"""What every peer has in common: it holds one model, and answers timing requests in JSON lines on stdin and stdout.

    {"do": "prefill", "batch": 4, "prompt": 512, "capacity": 640}  ->  {"seconds": 1.9}
    {"do": "decode", "new": 128}                                   ->  {"seconds": 2.4}    behind the last prefill
    {"do": "peak"}                                                 ->  {"bytes": 812000000}

The first line it writes tells what it is: {"program": ..., "version": ..., "weights": ..., "threads": ...}. It ends
when stdin does. Needs nothing but Python, since peers run in environments of their own.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any, Protocol


class Program(Protocol):
    """A model in memory. Only `prefill` and `step` are timed; both end with logits that choose the next token."""

    about: dict[str, Any]

    def prepare(self, batch: int, capacity: int) -> None: ...

    def prefill(self, prompt: int) -> None: ...

    def step(self) -> None: ...


def serve(program: Program) -> None:
    """Answer requests until stdin ends. What the program itself prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    tell(program.about)
    for line in sys.stdin:
        tell(answer_to(json.loads(line), program))


def answer_to(request: dict[str, Any], program: Program) -> dict[str, Any]:
    """Do what `request` asks for. Raises ValueError for what no peer can do."""
    if request["do"] == "peak":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"bytes": peak if sys.platform == "darwin" else peak * 1024}
    if request["do"] == "prefill":
        program.prepare(request["batch"], request["capacity"])
        start = time.perf_counter()
        program.prefill(request["prompt"])
    elif request["do"] == "decode":
        start = time.perf_counter()
        for _ in range(request["new"]):
            program.step()
    else:
        raise ValueError(f"no such request: {request}")
    return {"seconds": time.perf_counter() - start}
