"""House rules that a machine can check: sizes, signatures, exceptions, inheritance, docstrings, packaging."""

from __future__ import annotations

import ast
import tomllib
from itertools import pairwise

from tests.house import PACKAGES, ROOT, all_sources, functions, package_sources

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 6
# What a class may inherit from (or a subscript of it).
BASES = {"Module", "BaseModel", "Exception", "Protocol", "NamedTuple", "Enum", "StrEnum", "IntEnum", "Structure"}
BASES |= {"Function"}  # of autograd
BROAD = {"Exception", "BaseException"}
# Typer reads a command's options from its signature, so these take as many parameters as the verb has options.
COMMANDS = {"bench", "distill", "eval", "export", "generate", "plan", "prune", "quantize", "run"}

ALL = all_sources()
PACKAGE = package_sources()


def is_device_code(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Triton compiles it: its parameters are the arguments of a binary, all of them numbers and pointers."""
    return any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list)


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    signature = node.args
    named = [*signature.posonlyargs, *signature.args, *signature.kwonlyargs]
    return [argument.arg for argument in named if argument.arg not in ("self", "cls")]


def is_command(module: str, name: str) -> bool:
    return module == f"compress.cli.{name}" and name in COMMANDS


def test_file_length() -> None:
    lengths = {source.label: len(source.path.read_text(encoding="utf-8").splitlines()) for source in ALL}
    assert {label: length for label, length in lengths.items() if length >= MAX_FILE_LINES} == {}


def test_function_length() -> None:
    found = [(source.label, node) for source in ALL for node in functions(source)]
    lengths = {(label, node.name): (node.end_lineno or node.lineno) - node.lineno + 1 for label, node in found}
    assert {name: length for name, length in lengths.items() if length >= MAX_FUNCTION_LINES} == {}


def test_parameters() -> None:
    host = [(source, node) for source in PACKAGE for node in functions(source) if not is_device_code(node)]
    found = [(source, node.name, parameters(node)) for source, node in host]
    many = [(source.module, name) for source, name, taken in found if len(taken) > MAX_PARAMETERS]
    assert [(module, name) for module, name in many if not is_command(module, name)] == []
    assert {name for module, name in many if is_command(module, name)} == COMMANDS, "an exemption is not needed"


def test_no_global_and_no_broad_except() -> None:
    bad = []
    for source in ALL:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Global):
                bad.append(f"{source.label}:{node.lineno}: global")
            if isinstance(node, ast.ExceptHandler):
                caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                if any(one is None or ast.unparse(one) in BROAD for one in caught):
                    bad.append(f"{source.label}:{node.lineno}: broad except")
    assert bad == []


def test_inheritance() -> None:
    classes = [(s, node) for s in PACKAGE for node in ast.walk(s.tree) if isinstance(node, ast.ClassDef)]
    bases = [(source.label, node.name, ast.unparse(base)) for source, node in classes for base in node.bases]
    assert [place for place in bases if place[2].partition("[")[0].rpartition(".")[2] not in BASES] == []


def test_prints_only_in_the_command_line() -> None:
    below = [source for source in PACKAGE if not source.module.startswith("compress.cli")]
    calls = [(s.label, node) for s in below for node in ast.walk(s.tree) if isinstance(node, ast.Call)]
    assert [(label, node.lineno) for label, node in calls if ast.unparse(node.func) == "print"] == []


def test_first_lines() -> None:
    """Every file begins with its docstring; one that defines anything goes on with the annotations import."""
    bad = []
    for source in ALL:
        begins = source.path.read_text(encoding="utf-8").startswith('"""') and ast.get_docstring(source.tree)
        defines = any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in source.tree.body)
        if not begins or (defines and "from __future__ import annotations" not in ast.unparse(source.tree.body[1])):
            bad.append(source.label)
    assert bad == []


def test_names() -> None:
    assert [source.label for source in ALL if source.path.stem in ("utils", "helpers", "common", "misc")] == []


def test_packaging_lists_every_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    found = {
        ".".join([package, *init.parent.relative_to(ROOT / folder).parts])
        for folder, package in PACKAGES.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert sorted(found) == listed


def test_constraints_are_exact_sorted_and_cover_the_dependencies() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert all(first < second for first, second in pairwise(pins))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["test"]
    names = {line.partition(">=")[0].lower().replace("_", "-") for line in wanted}
    assert names - {name.lower().replace("_", "-") for name in pins} == set()
