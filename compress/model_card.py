"""The README.md of a checkpoint folder: what it is, how it was made, how to load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compress.checkpoint.manifest import Manifest

LOADER = "`transformers.AutoModelForCausalLM.from_pretrained`"


def model_card(told: Manifest) -> str:
    """The whole text, in Markdown with the header that hubs read."""
    schemes = sorted({layer["scheme"] for layer in told.layers})
    smaller = told.size["bytes_baseline"] / max(1, told.size["bytes"])
    size = f"{told.size['bytes']:,} bytes in all, {smaller:.2f} times smaller than the source."
    if told.layers:
        bits = f"{told.size['bits_per_weight']:.3f} bits per weight, scales included"
        size = f"{len(told.layers)} linear layers at {bits}; {size}"
    title = f"compressed to {', '.join(schemes)}" if schemes else "with float weights"
    skipped = ", ".join(row["name"] for row in told.skipped) or "nothing"
    lines = [
        "---",
        "library_name: transformers",
        f"tags: [{', '.join(['lmpress', *schemes])}]",
        "---",
        f"# {told.source['model_type']} {title}",
        "",
        *[f"Written by lmpress {told.versions['lmpress']}{_compression(told)}.", *map(_phase, told.phases)],
        size,
        f"Fallbacks: {len(told.fallbacks)}. Left alone: {skipped}.",
        "",
    ]
    if told.source["note"]:
        lines += [f"About the source weights: {told.source['note']}", ""]
    return "\n".join([*lines, _loading(schemes), ""])


def _compression(told: Manifest) -> str:
    """With which methods the layers were compressed, and on what tokens."""
    if not told.layers:
        return ""
    layers = told.layers
    methods = sorted({layer["method"] for layer in layers} | {name for layer in layers for name in layer["transforms"]})
    tokens = "no calibration data"
    if told.calibration:
        tokens = f"{told.calibration['tokens']} calibration tokens from {told.calibration['source']!r}"
    return f" with {', '.join(methods)} and {tokens}"


def _phase(row: Mapping[str, Any]) -> str:
    """What a phase did that took the whole model."""
    if row["kind"] == "shrink":
        before, after = row["parameters"]["before"], row["parameters"]["after"]
        methods = ", ".join(stage["method"] for stage in row["stages"])
        return f"Cut by {methods} from {before:,} to {after:,} parameters."
    return f"Trained by {row['method']} on {row['data']['source']!r}."


def _loading(schemes: Sequence[str]) -> str:
    """What loads it."""
    if not schemes:
        return f"Loads with {LOADER}."
    loader = f"{LOADER}, where compressed-tensors is installed"
    if "LLM_INT8" in schemes:
        return "Outlier columns have no words in compressed-tensors: load it with lmpress."
    if any(scheme.endswith("+2:4") for scheme in schemes):
        return "Kept values of 2:4 have no words in compressed-tensors: load it with lmpress, or `lmpress export` it."
    if "W4A16_ASYM" in schemes:
        return f"Loads with {loader}, given `CompressedTensorsConfig(dequantize=True)`."
    return f"Loads with {loader}."
