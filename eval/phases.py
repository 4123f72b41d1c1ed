"""What shrinking and distillation did to a whole model, as tables: from the rows of its manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compress.eval.table import Table, number, storage

Rows = Sequence[Mapping[str, Any]]


def phase_tables(phases: Rows) -> list[Table]:
    """A table per stage that cut or trained the whole model, in order."""
    makers = {"shrink": _shrink_table, "distill": _distill_table}
    return [makers[row["kind"]](row) for row in phases]


def _shrink_table(row: Mapping[str, Any]) -> Table:
    counted = {"parameters": row["parameters"], **row["sizes"]}
    changed = {name: both for name, both in counted.items() if both["before"] != both["after"]}
    rows = [
        (name.replace("_", " "), number(both["before"], ","), number(both["after"], ","))
        for name, both in changed.items()
    ]
    cache = row["kv_bytes_per_token"]
    rows.append(("key-value cache per token", storage(cache["before"]), storage(cache["after"])))
    methods = ", ".join(stage["method"] for stage in row["stages"])
    note = "; ".join([f"blocks of the source: {', '.join(map(str, row['layers_kept']))}", *row["notes"]])
    return Table(f"Student cut by {methods}", ("", "before", "after"), tuple(rows), note)


def _distill_table(row: Mapping[str, Any]) -> Table:
    if "blocks" in row:
        return _block_table(row)
    rows = tuple((str(step), number(_mean_loss(row, step)), number(kl)) for step, kl in row["held_out"])
    losses = ", ".join(f"{term['weight']:g} x {term['method']}" for term in row["terms"])
    data, best = row["data"], min(row["held_out"], key=lambda one: (one[1], one[0]))
    told = [
        f"loss: {losses}; teacher {row['teacher']['signal']}",
        f"{data['sequences'] - data['held_out']} sequences of {data['seqlen']} tokens from {data['source']!r}, "
        f"{row['tokens']:,} tokens seen; {data['held_out']} more sequences held out",
        f"kept: step {best[0]}, the best on held-out sequences",
        *([f"ended early: {row['stopped']}"] if row["stopped"] else []),
        *data["notes"],
    ]
    columns = ("step", "loss since", "held-out KL to the teacher")
    return Table(f"Distillation by {row['method']}", columns, rows, "; ".join(told))


def _mean_loss(row: Mapping[str, Any], step: int) -> float | None:
    """The mean loss of the steps since the measurement before that at `step`."""
    steps = [at for at, _ in row["held_out"]]
    since = row["losses"][max((at for at in steps if at < step), default=0) : step]
    return sum(since) / len(since) if since else None


def _block_table(row: Mapping[str, Any]) -> Table:
    keys = ("error_db_before", "error_db_after")
    rows = tuple((one["name"], *(number(one[key], ".3g") for key in keys)) for one in row["blocks"])
    note = "signal over error of each block's output against the teacher's, dB, on sequences held out; higher is better"
    return Table("Distillation block by block", ("block", "dB before", "dB"), rows, note)
