"""The run's log beside its output: one JSON line per event, flushed at once, so that it survives a kill.

It lies outside the output folder because it tells times, which differ between runs of one recipe.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol


class Observer(Protocol):
    """Who watches a run. An event is a kind and plain values."""

    def event(self, kind: str, /, **fields: Any) -> None: ...


def log_path(output: Path) -> Path:
    """Where the log of a run that writes `output` lies. A resumed run appends to it."""
    return output.parent / f"{output.name}.log.jsonl"


class Logged:
    """An observer that writes every event to the log and then hands it on."""

    def __init__(self, output: Path, observer: Observer) -> None:
        self.path = log_path(output)
        self.observer = observer

    def event(self, kind: str, /, **fields: Any) -> None:
        """Append one line and pass the event on. Mere progress is not worth a line."""
        if kind not in ("sampling", "sensitivity", "importance", "caching"):
            line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "kind": kind, **fields}
            with self.path.open("ab") as stream:
                stream.write(json.dumps(line).encode() + b"\n")
                stream.flush()
                os.fsync(stream.fileno())
        self.observer.event(kind, **fields)
