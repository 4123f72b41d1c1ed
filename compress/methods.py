"""Methods by name: `gptq` under `quantize` is the module `compress.quantize.gptq`. This is the whole plug-in system.

Every method module offers, beside its own function, Config (its settings: a pydantic model, frozen and closed) and
NEEDS (a frozenset of the input statistics it wants; empty: no calibration).
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from compress.errors import USAGE, InputError, did_you_mean

KINDS = ("shrink", "transform", "prune", "quantize", "distill")


def names(kind: str) -> list[str]:
    """Names of the methods of one kind, sorted: the modules of its package that hold a Config."""
    return [name for name in _modules(kind) if hasattr(_module(kind, name), "Config")]


def find(kind: str, name: str) -> ModuleType:
    """The method module called `name`; InputError with the nearest known name otherwise."""
    if kind not in KINDS:
        raise InputError(
            f"kind: {kind!r} is not known{did_you_mean(kind, KINDS) or '.'} Known: {', '.join(KINDS)}", USAGE
        )
    if name in _modules(kind):
        module = _module(kind, name)
        if hasattr(module, "Config"):
            return module
    known = names(kind)
    raise InputError(
        f"method: {name!r} is not known{did_you_mean(name, known) or '.'} Known: {', '.join(known)}", USAGE
    )


def summary(module: object) -> str:
    """The first line of the docstring of a method, a format or a kernel."""
    return (module.__doc__ or "").strip().partition("\n")[0]


def _modules(kind: str) -> list[str]:
    """Names of the public modules of the package of `kind`, sorted, without importing them."""
    package = importlib.import_module(f"compress.{kind}")
    return sorted(entry.name for entry in pkgutil.iter_modules(package.__path__) if not entry.name.startswith("_"))


def _module(kind: str, name: str) -> ModuleType:
    return importlib.import_module(f"compress.{kind}.{name}")
