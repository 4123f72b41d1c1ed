"""Errors that a user can cause: one line that names the file, the field, the value and the mend."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

FAILED = 1
USAGE = 2
GATE = 3


class InputError(Exception):
    """A mistake in what was handed in. `exit_code` is 1 (failed), 2 (usage or invalid recipe) or 3 (a gate failed)."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the known word nearest to `word`, or an empty string."""
    near = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
