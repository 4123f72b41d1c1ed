"""Strict JSON: one object per document, duplicate keys refused, every complaint one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compress.errors import InputError


def parse_object(text: str | bytes, source: object) -> dict[str, Any]:
    """The JSON object in `text`; `source` is named in errors.

    Raises InputError for text that is not UTF-8 JSON, is not an object, or gives a key twice (readers keep the last
    one and say nothing).
    """

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in found if keys.count(key) > 1)
            raise InputError(f"{source}: key {twice!r} is given twice: keep one")
        return found

    try:
        # Decoded here, because json would also guess at UTF-16 and UTF-32.
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(text, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: is not valid JSON ({error}): write or copy it again") from error
    if not isinstance(value, dict):
        raise InputError(f"{source}: is a JSON {type(value).__name__}, not an object: write or copy it again")
    return value


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises InputError for a file that is missing, unreadable or not one JSON object."""
    try:
        text = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}): give a complete checkpoint folder") from error
    return parse_object(text, file)
