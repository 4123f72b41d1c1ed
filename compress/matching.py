"""Which modules a recipe's patterns name: globs over module names, class names, and `re:` regular expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from compress.errors import USAGE, InputError, did_you_mean


def matches(pattern: str, name: str, class_name: str) -> bool:
    """Whether `pattern` names the module `name` of class `class_name`.

    A glob must cover the whole name, or the whole of its last dotted parts: `q_proj` names every `...self_attn.q_proj`.
    """
    if pattern.startswith("re:"):
        return re.search(pattern[3:], name) is not None
    return pattern == class_name or fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def select(modules: Mapping[str, str], targets: Iterable[str], ignore: Iterable[str], where: str) -> list[str]:
    """The names in `modules` (name -> class name) that `targets` name and `ignore` does not, in the order of `modules`.

    Raises InputError naming `where` (a recipe path) for a pattern that matches nothing or does not compile.
    """
    chosen: set[str] = set()
    for field, patterns in (("targets", targets), ("ignore", ignore)):
        for pattern in patterns:
            hits = {
                name for name, class_name in modules.items() if _checked(pattern, name, class_name, f"{where}.{field}")
            }
            if not hits:
                words = set(modules.values()) | {part for name in modules for part in name.split(".")}
                raise InputError(
                    f"{where}.{field}: {pattern!r} matches no module{did_you_mean(pattern, words)}; "
                    "give a glob over module names, a class name, or 're:...'",
                    USAGE,
                )
            chosen = chosen | hits if field == "targets" else chosen - hits
    return [name for name in modules if name in chosen]


def _checked(pattern: str, name: str, class_name: str, where: str) -> bool:
    try:
        return matches(pattern, name, class_name)
    except re.error as error:
        raise InputError(
            f"{where}: {pattern!r} is not a regular expression ({error}): mend the pattern", USAGE
        ) from None
