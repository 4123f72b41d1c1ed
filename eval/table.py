"""A table of text, and how figures are written in its cells."""

from __future__ import annotations

from dataclasses import dataclass

NOT_MEASURED = "–"


@dataclass(frozen=True)
class Table:
    """rows: cells as text, one per column. failed: indexes of rows to mark. note: one line on how to read it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    failed: frozenset[int] = frozenset()

    @property
    def figures(self) -> tuple[bool, ...]:
        """For each column, whether it holds figures, which stand to the right, and not words."""
        cells = zip(*self.rows, strict=True) if self.rows else [()] * len(self.columns)
        return tuple(any(cell[:1].isdecimal() for cell in column) for column in cells)


def number(value: float | None, form: str = ".4g") -> str:
    """`value` in `form`, or a dash where it was not measured."""
    return NOT_MEASURED if value is None else format(value, form)


def storage(nbytes: float | None) -> str:
    """Bytes in decimal units, as disks and memory bandwidths count."""
    if nbytes is None:
        return NOT_MEASURED
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}" if nbytes < 1000 * scale else f"{nbytes / scale:,.0f} {unit}"
    return f"{nbytes:.0f} B"


def percent(share: float | None) -> str:
    return NOT_MEASURED if share is None else f"{100 * share:.3g} %"


def times(ratio: float | None) -> str:
    return NOT_MEASURED if ratio is None else f"{ratio:.3g} ×"


def rate(value: float | None) -> str:
    """Something per second: three digits, and no exponent."""
    return number(value, ".3g" if value is None or value < 1000 else ",.0f")


def measured(value: float | None, error: float | None, form: str = ".4g") -> str:
    """A value with its standard error."""
    return number(value, form) if value is None or error is None else f"{number(value, form)} ± {error:.2g}"
