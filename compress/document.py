"""Documents: plain data from YAML, overridden and checked key by key, every complaint one line that names the place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from compress.errors import USAGE, InputError, did_you_mean

Model = TypeVar("Model", bound=BaseModel)


class Place(NamedTuple):
    """Where in which document: what a message has to name. `path` is dotted; empty is the document itself."""

    document: str
    path: str = ""

    def at(self, *keys: object) -> Place:
        return Place(self.document, ".".join([*filter(None, [self.path]), *map(str, keys)]))

    def error(self, problem: str) -> InputError:
        return InputError(f"{self.document}: field {self.path!r} {problem}", USAGE)


def read(file: Path) -> Any:
    """Plain data of a YAML (or JSON) file.

    Duplicate keys are errors, since YAML readers keep the last one and say nothing. Raises InputError.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"{file}: not readable ({reason}): give a YAML file", USAGE) from error
    try:
        for line, key in _duplicates(yaml.compose(text, yaml.SafeLoader), set()):
            raise InputError(f"{file}: line {line}: field {key!r} is given twice: keep one", USAGE)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{file}: {_syntax(error)}", USAGE) from error


def override(document: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """A copy of `document` with `a.b=c` applied in order; c is read as YAML, numbers in the path index lists.

    Raises InputError for a change that is not of this form or whose path leads through something without keys.
    """
    result = deepcopy(dict(document))
    for change in changes:
        _set(result, change)
    return result


def validate(model: type[Model], data: Mapping[str, Any], place: Place) -> Model:
    """`model` from `data`. The first complaint, unknown keys before others, becomes an InputError."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    strangers = [problem for problem in problems if problem["type"] == "extra_forbidden"]
    problem = (strangers or problems)[0]
    keys = _given(problem["loc"], data)
    if strangers:
        raise unknown(place.at(*keys), _fields(model, keys[:-1]))
    if problem["type"] == "missing":
        raise place.at(*keys).error("is missing: give it a value")
    # A field that may be one of several types has a complaint for each of them.
    mends = [_mend(p["type"], p["msg"]) for p in problems if _given(p["loc"], data) == keys]
    raise place.at(*keys).error(f"is {short(problem['input'])}: {' or '.join(mends)}")


def refuse_unknown(data: Mapping[str, Any], known: Sequence[str], place: Place) -> None:
    """Raise InputError for the first key of `data` that is not in `known`."""
    for key in data:
        if key not in known:
            raise unknown(place.at(key), known)


def unknown(place: Place, known: Sequence[str]) -> InputError:
    """The error for a key, the last of `place`, that should have been one of `known`."""
    hint = did_you_mean(place.path.rpartition(".")[2], known) or "."
    return place.error(f"is unknown{hint} Known: {', '.join(known)}")


def short(value: Any) -> str:
    """`value` as a message shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _given(location: Sequence[int | str], data: Any) -> list[str]:
    """The part of pydantic's `location` that exists in the document, up to the first key that is missing there."""
    keys = []
    for key in location:
        if isinstance(data, Mapping):
            data = data.get(key)
        elif isinstance(data, list | tuple) and isinstance(key, int):
            data = data[key]
        else:
            break
        keys.append(str(key))
    return keys


def _mend(kind: str, message: str) -> str:
    """pydantic's message in the words of YAML."""
    if kind in ("tuple_type", "model_type", "too_short"):
        return {"tuple_type": "give a list", "model_type": "give a mapping of keys", "too_short": "give an entry"}[kind]
    return message.removeprefix("Value error, ").replace("Input should be", "it should be")


def _fields(model: type[BaseModel], path: Sequence[str]) -> tuple[str, ...]:
    """Field names of the model found by following `path` down from `model`."""
    for key in path:
        annotation = model.model_fields[key].annotation
        choices = [annotation, *getattr(annotation, "__args__", ())]
        model = next(choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel))
    return tuple(model.model_fields)


def _syntax(error: yaml.YAMLError) -> str:
    """One line out of PyYAML's several."""
    mark = getattr(error, "problem_mark", None)
    line = f"line {mark.line + 1}: " if mark is not None else ""
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return f"{line}not YAML ({problem}): mend the syntax"


def _duplicates(node: yaml.Node | None, seen: set[int]) -> Iterator[tuple[int, str]]:
    """(line, key) of every key that a mapping holds twice. `seen` guards against aliases that point back."""
    if not isinstance(node, yaml.MappingNode | yaml.SequenceNode) or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            yield from _duplicates(child, seen)
        return
    keys = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in keys and key.value != "<<":
                yield key.start_mark.line + 1, key.value
            keys.add(key.value)
        yield from _duplicates(value, seen)


def _set(document: dict[str, Any], change: str) -> None:
    """Apply one `a.b=c` in place."""
    path, equals, text = change.partition("=")
    keys = path.strip().split(".")
    if not equals or "" in keys:
        raise InputError(f"--set {change}: write it as path.to.key=value", USAGE)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"--set {change}: {_syntax(error)}", USAGE) from error
    node: Any = document
    for depth, key in enumerate(keys):
        if not isinstance(node, dict | list):
            place = ".".join(keys[:depth])
            raise InputError(f"--set {change}: {place!r} is {short(node)}, which has no keys: set it whole", USAGE)
        step: Any = key
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                raise InputError(f"--set {change}: {key!r} is not an index into {len(node)} entries from 0", USAGE)
            step = int(key)
        if depth == len(keys) - 1:
            node[step] = value
        else:
            node = node.setdefault(step, {}) if isinstance(node, dict) else node[step]
