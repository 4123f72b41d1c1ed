"""Layers: an import goes down only, inside functions too, and the run side never sees the compress side."""

from __future__ import annotations

import ast

import pytest

from tests.house import Source, imports, package_sources

# Part -> (layer, side). Files of one part may import each other; parts of one layer may not.
PARTS = {
    "errors": (-2, "run"),
    "formats": (-1, "run"),
    "architecture": (0, "run"),
    "texts": (0, "run"),
    "run_log": (0, "compress"),
    "document": (0, "compress"),
    "methods": (0, "compress"),
    "matching": (0, "compress"),
    "stats": (0, "compress"),
    "checkpoint": (1, "run"),
    "kernels": (1, "run"),
    "prune": (1, "compress"),
    "quantize": (1, "compress"),
    "shrink": (1, "compress"),
    "distill": (1, "compress"),
    "transform": (1, "compress"),
    "model": (1, "compress"),
    "recipe": (1, "compress"),
    "demo_model": (1, "compress"),
    "runtime": (2, "run"),
    "plan": (2, "compress"),
    "calibrate": (2, "compress"),
    "training": (3, "compress"),
    "eval": (3, "run"),
    "pipeline": (4, "compress"),
    "cli": (5, "compress"),
    "recipes": (5, "compress"),
}
# Files that share a part with the file they were split from.
SPLIT = {
    "solver": "stats",
    "stage": "recipe",
    "training_settings": "recipe",
    "assignment": "plan",
    "activations": "calibrate",
    "block": "pipeline",
    "phases": "pipeline",
    "model_card": "pipeline",
    "distillation": "pipeline",
    "outline": "pipeline",
    "shrinking": "pipeline",
    "outcome": "pipeline",
    "tokens": "pipeline",
    "walk": "pipeline",
    "resident": "pipeline",
    "sensitivity": "pipeline",
}
# What the run side may only import inside a function: a loaded model needs none of them.
HEAVY = ("transformers", "typer", "datasets", "accelerate", "lm_eval", "matplotlib", "triton")
# Written in Triton, and imported only to be compiled or interpreted.
DEVICE_CODE = tuple(f"compress.kernels.triton.{name}" for name in ("paged_attention", "w4a16", "w8a8"))

SOURCES = package_sources()
KNOWN = frozenset(source.module for source in SOURCES)


def part_of(module: str) -> str:
    """The part that `module` (compress.a.b) belongs to; empty for the package itself."""
    name = module.partition(".")[2].partition(".")[0]
    return SPLIT.get(name, name)


def complaints(source: Source) -> list[str]:
    """Everything that `source` imports and may not."""
    part = part_of(source.module)
    if not part:
        return []
    layer, side = PARTS[part]
    found = []
    for item in imports(source.tree, KNOWN):
        place = f"{source.label}:{item.line}: {source.module} imports {item.module}"
        if item.module.startswith("."):
            found.append(f"{place}: write absolute imports")
        target = part_of(item.module)
        if item.module.partition(".")[0] == "compress" and target and target != part:
            if PARTS[target][0] >= layer:
                found.append(f"{place}: {target} does not lie below {part}")
            if side == "run" and PARTS[target][1] == "compress":
                found.append(f"{place}: the run side may not see the compress side")
        heavy = set(HEAVY) - ({"triton"} if source.module in DEVICE_CODE else set())
        if side == "run" and not item.deferred and item.module.partition(".")[0] in heavy:
            found.append(f"{place}: heavy imports belong inside functions on the run side")
        if item.module in DEVICE_CODE:
            found.append(f"{place}: device code is found by the name of its variant, where it is compiled")
    return found


def test_every_file_has_a_place() -> None:
    assert {part_of(module) for module in KNOWN} - {""} <= set(PARTS)


def test_no_device_code_is_a_leftover() -> None:
    assert set(DEVICE_CODE) <= KNOWN


def test_no_part_is_a_leftover() -> None:
    assert set(PARTS) <= {part_of(module) for module in KNOWN}
    assert {f"compress.{name}" for name in SPLIT} <= KNOWN


def test_imports_go_down() -> None:
    assert [complaint for source in SOURCES for complaint in complaints(source)] == []


@pytest.mark.parametrize(
    ("module", "code", "count"),
    [
        ("compress.quantize.rtn", "from compress.stats import InputStats", 0),
        ("compress.quantize.rtn", "def f():\n    from compress import pipeline", 1),
        ("compress.quantize.rtn", "import compress.transform.awq", 1),
        ("compress.runtime.load", "def f():\n    import transformers", 0),
        ("compress.runtime.load", "import transformers.models", 1),
        ("compress.kernels.aot", "import triton", 1),
        ("compress.kernels.triton.w4a16", "import triton.language as tl", 0),
        ("compress.kernels.aot", "def f():\n    from compress.kernels.triton import w4a16", 1),
        ("compress.eval.run", "from compress.methods import find", 1),
        ("compress.eval.run", "from ..runtime import load", 1),
        ("compress.plan", "from compress.assignment import assign", 0),
    ],
    ids=[
        "down",
        "up in a function",
        "sideways",
        "heavy in a function",
        "heavy at the top",
        "Triton at the top",
        "Triton in device code",
        "device code",
        "across",
        "relative",
        "split",
    ],
)
def test_the_rule_catches(module: str, code: str, count: int) -> None:
    path = SOURCES[0].path
    assert len(complaints(Source(path, module, ast.parse(code)))) == count
