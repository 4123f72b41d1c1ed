"""The source tree as the house rules see it: files, their dotted names, their syntax trees and their imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGES = {"compress": "compress", "eval": "compress.eval", "recipes": "compress.recipes"}


class Source(NamedTuple):
    """One file: where it is, what it is imported as (empty for tests), and its syntax tree."""

    path: Path
    module: str
    tree: ast.Module

    @property
    def label(self) -> str:
        return str(self.path.relative_to(ROOT))


class Import(NamedTuple):
    """One imported module, and whether a call (rather than the import of the file) triggers it."""

    module: str
    line: int
    deferred: bool


def package_sources() -> list[Source]:
    """Every Python file that is shipped."""
    return [
        _source(path, ".".join([package, *path.relative_to(ROOT / folder).with_suffix("").parts]))
        for folder, package in PACKAGES.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def all_sources() -> list[Source]:
    """Every Python file of the project, tests included."""
    rest = [path for folder in ("tests", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
    return package_sources() + [_source(path, "") for path in rest]


def _source(path: Path, module: str) -> Source:
    return Source(path, module.removesuffix(".__init__"), ast.parse(path.read_text(encoding="utf-8"), str(path)))


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def imports(tree: ast.AST, known: frozenset[str]) -> list[Import]:
    """All imports in `tree`, in functions too. `from a import b` counts as a.b where `known` has such a module."""
    deferred = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        found += [Import(name, node.lineno, id(node) in deferred) for name in dict.fromkeys(names)]
    return found
