"""What a run shows while it works: a bar with the time left, and a line per block with what each layer lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeftColumn

from compress.eval.memory import peak_resident_bytes


class RunProgress:
    """Turns the events of a run into a bar and lines on the terminal."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self.bar = bar
        self.task = task
        self.blocks = 0
        self.tokens = 0

    def event(self, kind: str, /, **fields: Any) -> None:
        """Take in one event. Kinds that need no showing are let pass."""
        if kind == "started":
            self.blocks = fields["blocks"]
            self.bar.console.print(f"{fields['blocks']} blocks on {fields['device']}{resumed(fields['done'])}")
        elif kind == "sampling":
            self._show("writing calibration text", fields["done"], fields["total"])
        elif kind == "sensitivity":
            self._show("pruning layers one by one", fields["done"], fields["total"])
        elif kind == "tokens":
            self.tokens = fields["tokens"]
            self.bar.console.print(f"calibration: {self.tokens:,} tokens from {fields['source']!r}")
            self._show("blocks", 0, self.blocks)
        elif kind == "caching":
            self._show("asking the teacher", fields["done"], fields["total"])
        elif kind == "importance":
            self._show("measuring importances", fields["done"], fields["total"])
        elif kind == "training":
            loss, kl, speed = (fields[name] for name in ("loss", "kl", "tokens_per_second"))
            self._show(
                f"training, loss {loss:.3f}, KL {kl:.3f}, {speed:,.0f} tokens/s", fields["step"], fields["steps"]
            )
        elif kind == "recovered":
            gain = f"{fields['error_db_before']:.1f} -> {fields['error_db_after']:.1f} dB"
            self.bar.console.print(f"{fields['name']}: {gain}", highlight=False)
            self._show("training block by block", fields["index"] + 1, self.blocks)
        elif kind == "held_out":
            self.bar.console.print(f"step {fields['step']}: held-out KL {fields['kl']:.4f}", highlight=False)
        elif kind == "block":
            if fields["layers"]:
                self.bar.console.print(block_line(fields, peak_resident_bytes()), highlight=False)
            self._show("blocks", fields["index"] + 1, self.blocks)

    def _show(self, what: str, done: int, total: int) -> None:
        self.bar.update(self.task, description=what, completed=done, total=total)


def resumed(done: int) -> str:
    """What to add where an earlier run has finished the first `done` blocks; they count from 0."""
    return f", resumed behind block {done - 1}" if done else ""


def block_line(fields: dict[str, Any], peak: int) -> str:
    """One line for a finished block: error per layer in dB, damping, what to worry about, seconds and peak memory."""
    layers = fields["layers"]
    errors = "  ".join(f"{layer['name'].rpartition('.')[2]} {layer['error_db']:.1f}" for layer in layers)
    damping = max((layer["damping"] for layer in layers if layer["damping"] is not None), default=None)
    told = [f"{errors} dB"]
    if damping is not None:
        told.append(f"damping {damping:g}")
    dead = sum(layer["dead_channels"] for layer in layers)
    if dead:
        told.append(f"{dead} dead channels")
    columns = sum(len(layer["outlier_columns"]) for layer in layers)
    if columns:
        told.append(f"{columns} outlier columns")
    fallbacks = [layer["name"] for layer in layers if layer["fallback"]]
    if fallbacks:
        told.append(f"FALLBACK: {', '.join(fallbacks)}")
    told += [f"{fields['seconds']:.1f} s", f"{peak / 1e9:.2f} GB"]
    return f"{fields['name']}: {' | '.join(told)}"


@contextmanager
def watching() -> Iterator[RunProgress]:
    """Progress on stderr, silent where that is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeLeftColumn(), console=console, disable=not console.is_terminal) as bar:
        if not console.is_terminal:
            console.quiet = True
        yield RunProgress(bar, bar.add_task("preparing", total=None))
