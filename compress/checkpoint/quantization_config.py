"""quantization_config of config.json: which linear layer is stored under which scheme.

Written in compressed-tensors' words wherever it has them. Outlier columns and 2:4 weights it cannot say; a model with
some is written as `quant_method: lmpress`: the same fields, plus `version`, `dtype` (of scales, outlier columns and
pruned floats) and, per group, `scheme`, `outliers: {threshold}` and `sparsity: "2:4"`. Weights of type `float` with 16
bits are pruned floats. Read from either, including what other tools write in compressed-tensors' words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from compress.checkpoint.reader import Checkpoint
from compress.errors import InputError
from compress.formats import FORMATS, format_named, sparse24
from compress.formats.grid import FLOAT_BITS
from compress.formats.scheme import FLOATS, SCHEMES, Scheme, pruned

COMPRESSED_TENSORS = "compressed-tensors"
OURS = "lmpress"
OUR_VERSION = 1
MIXED = "mixed-precision"
LINEAR = "Linear"
PLACE = "config.json: quantization_config"
METHOD_NAMES = {"gptq": "GPTQ", "awq": "AWQ", "fp8": "FP8", "auto-round": "AutoRound", "hqq": "HQQ"}

# What compressed-tensors takes for a field that is not there.
DEFAULTS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "actorder": None, "strategy": None}
WEIGHTS: dict[str, tuple[Any, ...]] = {
    "type": ("int",),
    "num_bits": (4, 8),
    "symmetric": (True, False),
    "dynamic": (False,),
    "actorder": (None, False, "static", "weight"),  # act-order by group needs a column map in every layer
}
ACTIVATIONS: dict[str, tuple[Any, ...]] = {
    "type": ("int",),
    "num_bits": (8,),
    "symmetric": (True,),
    "dynamic": (True,),
    "strategy": ("token",),
}


def build(schemes: Mapping[str, Scheme], ignored: Sequence[str], model_dtype: torch.dtype) -> dict[str, Any]:
    """The quantization_config of a model whose linear layers have these `schemes` (module name -> scheme).

    ignored: names of the linear layers that stay as they are. model_dtype: dtype of scales and outlier columns.
    Raises ValueError for a model without a compressed layer.
    """
    if not schemes:
        raise ValueError("no layer is compressed, so there is no quantization_config")
    groups: dict[Scheme, list[str]] = {}
    for module, scheme in schemes.items():
        groups.setdefault(scheme, []).append(module)
    formats = {scheme.format for scheme in groups}
    ours = any(scheme.threshold is not None or scheme.format == sparse24.NAME for scheme in groups)
    # One scheme: the class name, as other tools write it. Several: names, whose precedence no loader can get wrong.
    targets = {scheme: [LINEAR] if len(groups) == 1 else names for scheme, names in groups.items()}
    config = {
        "quant_method": OURS if ours else COMPRESSED_TENSORS,
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "ignore": list(ignored),
        "config_groups": {
            f"group_{number}": _group(scheme, targets[scheme], ours) for number, scheme in enumerate(groups)
        },
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    return config | ({"version": OUR_VERSION, "dtype": str(model_dtype).removeprefix("torch.")} if ours else {})


def parse(config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
    """The scheme of each compressed module among `modules`, the names of the model's linear layers.

    config: all of config.json, or its quantization_config. A model that is not quantized has no schemes.
    Raises InputError, naming the field, for a method, layout or arithmetic that cannot be run here.
    """
    section = _section(config)
    if section is None:
        return {}
    if section.get("quant_method") not in (COMPRESSED_TENSORS, OURS):
        raise InputError(f"{PLACE}: is {describe(config)}, which cannot be run here: start from the unquantized model")
    _refuse_extras(section)
    schemes: dict[str, Scheme] = {}
    for name, group in _object(section, "config_groups", PLACE).items():
        targets, scheme = _read_group(f"{PLACE}.config_groups.{name}", name, group, section.get("format"))
        schemes |= {target: scheme for target in targets}
    # compressed-tensors' precedence: exact names, then patterns in order, then the class.
    ordered = sorted(schemes, key=lambda target: (target == LINEAR, target.startswith("re:"), target))
    ignored = _strings(section.get("ignore") or [], f"{PLACE}.ignore")
    found: dict[str, Scheme] = {}
    modules = list(modules)
    for module in modules:
        target = next((target for target in ordered if _matches(module, target)), None)
        if target is not None and not any(_matches(module, pattern) for pattern in ignored):
            found[module] = schemes[target]
    for target in ordered:
        if not target.startswith("re:") and not any(_matches(module, target) for module in modules):
            raise InputError(f"{PLACE}: target {target!r} is no linear layer of this model: it cannot be run here")
    return found


def stored_schemes(checkpoint: Checkpoint) -> dict[str, Scheme]:
    """The scheme of each compressed linear layer of a checkpoint: those that store a scale or indices."""
    stored = [name.rpartition(".") for name in checkpoint.tensors]
    marked = dict.fromkeys(module for module, _, suffix in stored if suffix in ("weight_scale", "weight_indices"))
    return parse(checkpoint.config, list(marked))


def stored_shape(checkpoint: Checkpoint, module: str, scheme: Scheme) -> tuple[int, int]:
    """Rows and columns of the weight that `module` stores under `scheme`, from its header."""
    prefix = f"{module}."
    stored = {name[len(prefix) :]: info.shape for name, info in checkpoint.tensors.items() if name.startswith(prefix)}
    return format_named(scheme.format).shape(stored, scheme.grid)


def describe(config: Mapping[str, Any]) -> str:
    """How a model is quantized, in one phrase: "GPTQ, 4 bits, group size 128". config: as for `parse`."""
    section = _section(config)
    if section is None:
        return "not quantized"
    method = str(section.get("quant_method") or "an unnamed method")
    parts = [METHOD_NAMES.get(method, method)]
    groups = section.get("config_groups")
    groups = groups.values() if isinstance(groups, dict) else []
    weights = [group.get("weights") for group in groups if isinstance(group, dict)]
    for args in [args for args in weights if isinstance(args, dict)] or [section]:
        bits = args.get("num_bits") or args.get("bits") or args.get("w_bit")
        bits = bits or (8 if args.get("load_in_8bit") else 4 if args.get("load_in_4bit") else None)
        group_size = args.get("group_size") or args.get("q_group_size")
        parts += [f"{bits} bits"] if bits else []
        parts += [f"group size {group_size}"] if group_size and group_size != -1 else []
    stored = section.get("format") or section.get("bnb_4bit_quant_type")
    return ", ".join(dict.fromkeys([*parts, *([str(stored)] if stored else [])]))


def _section(config: Mapping[str, Any]) -> dict[str, Any] | None:
    section = config.get("quantization_config", config if "quant_method" in config else None)
    if section is not None and not isinstance(section, dict):
        raise InputError(f"{PLACE}: is not an object: remove it or write it again")
    return section


def _group(scheme: Scheme, targets: list[str], ours: bool) -> dict[str, Any]:
    activations = {"num_bits": scheme.activation_bits, "type": "int", "symmetric": True, "strategy": "token"}
    group: dict[str, Any] = {
        "targets": targets,
        "weights": {
            "num_bits": scheme.grid.bits,
            "type": "float" if scheme.grid.bits == FLOAT_BITS else "int",
            "symmetric": scheme.grid.symmetric,
            "strategy": "channel" if scheme.grid.group_size is None else "group",
            "group_size": scheme.grid.group_size,
            "dynamic": False,
            "actorder": None,
        },
        "input_activations": None if scheme.activation_bits is None else {**activations, "dynamic": True},
        "output_activations": None,
        "format": scheme.format,
    }
    if ours:
        outliers = None if scheme.threshold is None else {"threshold": scheme.threshold}
        sparsity = str(scheme.pattern) if scheme.format == sparse24.NAME else None
        group |= {"scheme": scheme.name, "outliers": outliers, "sparsity": sparsity}
    return group


def _read_group(place: str, name: str, group: Any, stored: Any) -> tuple[list[str], Scheme]:
    """Targets and scheme of one config group: an object, or the name of a preset with its list of targets."""
    if isinstance(group, list):
        if name not in SCHEMES:
            raise InputError(f"{place}: preset {name!r} cannot be run here (known: {', '.join(SCHEMES)})")
        return _strings(group, place), SCHEMES[name]
    if not isinstance(group, dict):
        raise InputError(f"{place}: is not an object: write it again")
    targets = _strings(group.get("targets"), f"{place}.targets")
    weights = _object(group, "weights", place)
    sparsity = group.get("sparsity")
    if sparsity not in (None, str(sparse24.PATTERN)):
        raise InputError(f"{place}.sparsity: is {sparsity!r}, which cannot be run here (only '{sparse24.PATTERN}')")
    if sparsity is not None and (weights.get("type"), weights.get("num_bits")) == ("float", FLOAT_BITS):
        return targets, pruned(FLOATS, sparse24.PATTERN)
    _require(f"{place}.weights", weights, WEIGHTS)
    activations = group.get("input_activations")
    if activations is not None:
        _require(f"{place}.input_activations", _object(group, "input_activations", place), ACTIVATIONS)
    if group.get("output_activations") is not None:
        raise InputError(f"{place}.output_activations: quantized outputs cannot be run here")
    threshold = None
    if group.get("outliers") is not None:
        threshold = _object(group, "outliers", place).get("threshold")
        if not isinstance(threshold, int | float):
            raise InputError(f"{place}.outliers.threshold: is {threshold!r}, not a number: write it again")
    stored = group.get("format") or stored
    group_size = _group_size(f"{place}.weights", weights)
    wanted = (weights.get("num_bits", 8), weights.get("symmetric", True), None if activations is None else 8)
    for known in SCHEMES.values():
        scheme = known if sparsity is None else pruned(known, sparse24.PATTERN)
        said = (scheme.grid.bits, scheme.grid.symmetric, scheme.activation_bits)
        fits = (scheme.threshold is None) == (threshold is None) and stored in (None, MIXED, scheme.format)
        if said == wanted and fits and (group_size is None or scheme.grid.group_size is not None):
            return targets, replace(scheme, grid=replace(scheme.grid, group_size=group_size), threshold=threshold)
    bits, symmetric, activation_bits = wanted
    phrase = f"W{bits}A{activation_bits or 16}, {'symmetric' if symmetric else 'asymmetric'}, group size {group_size}"
    raise InputError(f"{place}: {phrase}, stored as {stored!r}, cannot be run here (formats: {', '.join(FORMATS)})")


def _group_size(place: str, weights: Mapping[str, Any]) -> int | None:
    group_size = weights.get("group_size")
    inferred = {None: "tensor", -1: "channel"}.get(group_size, "group") if isinstance(group_size, int | None) else None
    strategy = weights.get("strategy") or inferred
    if strategy == "channel" and group_size in (None, -1):
        return None
    if strategy == "group" and type(group_size) is int and group_size > 0:
        return group_size
    raise InputError(f"{place}: strategy {strategy!r} with group_size {group_size!r} cannot be run here")


def _refuse_extras(section: Mapping[str, Any]) -> None:
    """Raise InputError for what a loader must not ignore, because the model would compute something else."""
    sparsity = section.get("sparsity_config") or {}
    extras = {
        "kv_cache_scheme": section.get("kv_cache_scheme"),
        "sparsity_config": None if isinstance(sparsity, dict) and sparsity.get("format") == "dense" else sparsity,
        "transform_config": section.get("transform_config"),
    }
    for field, value in extras.items():
        if value:
            raise InputError(f"{PLACE}.{field}: is set, which cannot be run here: use a checkpoint without it")
    if section.get("quantization_status", "compressed") != "compressed":
        status = section["quantization_status"]
        raise InputError(f"{PLACE}.quantization_status: is {status!r}: save the model as 'compressed'")
    if section.get("quant_method") == OURS and section.get("version") != OUR_VERSION:
        raise InputError(f"{PLACE}.version: is {section.get('version')!r}: use the lmpress that wrote it")


def _require(place: str, args: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    for field, values in allowed.items():
        value = args.get(field, DEFAULTS[field])
        if value not in values:
            known = ", ".join(map(repr, values))
            raise InputError(f"{place}.{field}: is {value!r}, which cannot be run here (only {known})")


def _object(parent: Mapping[str, Any], key: str, place: str) -> dict[str, Any]:
    value = parent.get(key)
    if not isinstance(value, dict):
        raise InputError(f"{place}.{key}: is not an object: write it again")
    return value


def _strings(value: Any, place: str) -> list[str]:
    """A list of names and `re:` patterns, the patterns compiled once to see that they can be."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InputError(f"{place}: is not a list of names: write it again")
    for item in value:
        try:
            re.compile(item.removeprefix("re:") if item.startswith("re:") else "")
        except re.error as error:
            raise InputError(f"{place}: {item!r} is not a regular expression ({error}): write it again") from error
    return value


def _matches(module: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target in (module, LINEAR)
