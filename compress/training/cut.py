"""A student cut out of a model, written as a plain checkpoint before any training: what the shrink stages ask for.

Importances are measured on the source alone, once for all stages (Minitron, arXiv 2407.14679, finds one pass enough).
Tensors are then read, cut and written block by block: neither pass holds more than one block.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress import methods, texts
from compress.architecture import kv_bytes_per_token, one_line
from compress.calibrate import arithmetic
from compress.checkpoint.agreement import refuse_extra, refuse_missing, refuse_shape, strangers
from compress.checkpoint.header import TensorInfo
from compress.checkpoint.output import refuse_overlap
from compress.checkpoint.quantization_config import describe as describe_quantization
from compress.checkpoint.reader import Checkpoint, open_checkpoint
from compress.checkpoint.source import dominant_dtype, identity
from compress.checkpoint.strict_json import read_object
from compress.checkpoint.tokenizer import tokenizer_files
from compress.checkpoint.writer import Section, Writer
from compress.errors import USAGE, InputError
from compress.model import FAMILIES, Skeleton, build_skeleton
from compress.plan import duplicates
from compress.run_log import Observer
from compress.shrink import (
    CHANNEL,
    MEASURED,
    SIZES,
    Cut,
    Measured,
    cut_shape,
    cut_tensor,
    share_kept,
    trail,
)
from compress.stage import Stage
from compress.training.importance import embedded, measure

# What was cut, beside the weights: a plain checkpoint has no manifest.
FACTS = "shrink.json"
PACKAGES = ("lmpress", "torch", "transformers")


# From what was cut, the tensors as written and the sha256 of their bytes, to further files of the folder.
Closing = Callable[[dict[str, Any], Mapping[str, TensorInfo], Mapping[str, str]], Mapping[str, str | bytes | Path]]


@dataclass(frozen=True)
class CutOptions:
    """How to cut, beside what. device: where importances are measured. restart: drop what an earlier run left.

    fingerprint: of all that decides the result; by default that of model, stages and tokens. closing: gives files that
    are to lie beside config.json and the tokenizer.
    """

    device: torch.device
    restart: bool = False
    fingerprint: str | None = None
    closing: Closing = lambda told, tensors, sha256: {}


@dataclass(frozen=True)
class Outcome:
    """A finished student's folder, and what `describe` says of it with what was chosen and measured."""

    folder: Path
    told: dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Shrink stages bound to a model. config: its config.json with every size spelt out, and a type per layer where
    transformers has one. dropped: a second copy of tied embeddings, and tables that loaders compute."""

    source: Checkpoint
    skeleton: Skeleton
    config: dict[str, Any]
    stages: tuple[Stage, ...]
    dropped: frozenset[str]

    @property
    def row(self) -> str:
        """What the names of all blocks begin with."""
        return self.skeleton.blocks[0].removesuffix("0")


@dataclass(frozen=True)
class Derived:
    """A tensor of the student: the source's tensor `name`, of `role` within its block, behind the cuts of `steps`."""

    name: str
    role: str = ""
    steps: tuple[tuple[Cut, int], ...] = ()

    def shape(self, source: Checkpoint) -> tuple[int, ...]:
        return cut_shape(self.steps, self.role, source.tensors[self.name].shape)

    def nbytes(self, source: Checkpoint) -> int:
        return prod(self.shape(source)) * source.tensors[self.name].dtype.itemsize

    def read(self, source: Checkpoint) -> Tensor:
        return cut_tensor(self.steps, self.role, source.read(self.name))


Student = dict[str, dict[str, Derived]]


def needs(stages: Sequence[Stage]) -> frozenset[str]:
    """The importances that the stages want; empty: they need no calibration tokens."""
    return frozenset().union(*(methods.find("shrink", stage.method).needs(stage.settings) for stage in stages))


def describe(folder: Path, stages: Sequence[Stage]) -> dict[str, Any]:
    """Layers, sizes, weights and key-value cache bytes per token before and after, told before a weight is read.

    Raises InputError for what the stages cannot do to the model in `folder`.
    """
    job = prepare(folder, stages)
    return _described(job, *_chain(job, None))


def config_of(folder: Path, stages: Sequence[Stage]) -> dict[str, Any]:
    """config.json of the student that `stages` leave of the model in `folder`. Raises InputError as `describe`."""
    return _chain(prepare(folder, stages), None)[0]


def cut(
    folder: Path,
    stages: Sequence[Stage],
    output: Path,
    ids: Tensor | None,
    options: CutOptions,
    observer: Observer,
) -> Outcome:
    """Write the student that `stages`, in their order, cut out of the float model in `folder` to `output`.

    ids: calibration tokens int64 [S, T], for stages that need them. The same call after a kill goes on and ends in the
    same bytes. Raises InputError for what the stages cannot do to the model; nothing half-written takes the name of the
    output.
    """
    job, device = prepare(folder, stages), options.device
    refuse_overlap(output, folder)
    wanted = needs(stages)
    if wanted and ids is None:
        where = next(stage.where for stage in stages if needs([stage]))
        raise InputError(f"{where}.shrink: measures {', '.join(sorted(wanted))} on a text: give calibration", USAGE)
    fingerprint = options.fingerprint or _fingerprint(job, ids if wanted else None, device)
    writer = Writer(output, _sections(job), fingerprint, restart=options.restart)
    if writer.complete:
        return Outcome(output, read_object(output / FACTS))
    measured = _measured(job, ids, writer.work, device, observer) if ids is not None and wanted else {}
    config, cuts = _chain(job, measured)
    _write(job, cuts, writer)
    told = _described(job, config, cuts) | _chosen(job, cuts, measured) | {"measured_on": _tokens(ids, wanted)}
    files: dict[str, str | bytes | Path] = {file.name: file for file in tokenizer_files(job.source.folder)}
    files["config.json"] = _json(config)
    files[FACTS] = _json(told)
    writer.finish(files | dict(options.closing(told, writer.tensors, writer.sha256)))
    return Outcome(output, told)


def _measured(job: Job, ids: Tensor, work: Path, device: torch.device, observer: Observer) -> dict[str, Tensor]:
    """What the stages want measured, by one pass over the tokens; hidden states beyond a budget are kept in `work`."""

    def progress(done: int, total: int) -> None:
        observer.event("importance", done=done, total=total)

    progress(0, len(job.skeleton.blocks))
    calibration = embedded(job.source, job.skeleton, ids, work, device)
    try:
        return measure(job.source, job.skeleton, calibration, needs(job.stages), device, progress)
    finally:
        calibration.hidden.close()


def prepare(folder: Path, stages: Sequence[Stage]) -> Job:
    """Open the model in `folder` and check that the stages can be done to it. Raises InputError."""
    source = open_checkpoint(folder)
    place = source.folder / "config.json"
    if source.quantization is not None:
        what = describe_quantization(source.config)
        raise InputError(
            f"{place}: the model is quantized ({what}), and a student is cut from float weights: give those"
        )
    if source.config["model_type"] not in FAMILIES:
        raise InputError(
            f"{place}: model_type {source.config['model_type']!r} cannot be shrunk: known are {', '.join(FAMILIES)}"
        )
    skeleton = build_skeleton(source.folder)
    job = Job(source, skeleton, _completed(source, skeleton), tuple(stages), _dropped(source, skeleton))
    _refuse_unbuildable(job, _chain(job, None)[0])
    return job


def _completed(source: Checkpoint, skeleton: Skeleton) -> dict[str, Any]:
    """config.json with the fields that a cut may rewrite spelt out as transformers reads them."""
    sizes = skeleton.dimensions
    derived = {"num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head_dim}
    names = (*SIZES, "layer_types", "max_window_layers")
    read = {name: getattr(skeleton.config, name, None) for name in names} | derived
    silent = {name: value for name, value in read.items() if value is not None and source.config.get(name) is None}
    return {**source.config, **silent}


def _dropped(source: Checkpoint, skeleton: Skeleton) -> frozenset[str]:
    """Stored tensors that the student does without. Raises InputError unless the shards hold the skeleton's model."""
    wanted = {name: tuple(tensor.shape) for name, tensor in skeleton.model.state_dict().items()}
    second = f"{skeleton.output_name()}.weight"
    extra, derived = strangers(source.tensors, wanted)
    refuse_extra(source.folder, extra)
    missing = [name for name in wanted if name not in source.tensors]
    refuse_missing(source.folder, [name for name in missing if not (skeleton.tied and name == second)])
    for name in source.tensors.keys() & wanted.keys():
        refuse_shape(source.tensors[name], wanted[name])
    return frozenset((*derived, *duplicates(source, skeleton)))


def _refuse_unbuildable(job: Job, config: dict[str, Any]) -> None:
    """Raise InputError where transformers would refuse the student's config.json."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        AutoConfig.for_model(**config)
    except (ValueError, TypeError, StrictDataclassError) as error:
        where = job.stages[-1].where
        reason = one_line(error)
        raise InputError(
            f"{where}.shrink: transformers refuses the smaller model: {reason}: give other sizes", USAGE
        ) from error


def _chain(job: Job, measured: Measured | None) -> tuple[dict[str, Any], tuple[Cut, ...]]:
    """The student's config and the cut of each stage. measured None: with stand-ins for what is not known yet."""
    config, cuts = job.config, []
    for stage in job.stages:
        try:
            config, made = methods.find("shrink", stage.method).reshape(config, stage.settings, measured)
        except InputError as error:
            raise InputError(f"{stage.where}.shrink.{error}", USAGE) from error
        measured = None if measured is None else made.carry(measured)
        cuts.append(made)
    return config, tuple(cuts)


def _student(job: Job, cuts: tuple[Cut, ...]) -> Student:
    """Section -> its tensors, in writing order: each tensor outside the blocks alone, then the student's blocks."""
    names = [name for name in job.source.tensors if name not in job.dropped]
    student = {name: {name: Derived(name)} for name in names if not name.startswith(job.row)}
    for layer in range(len(cuts[-1].layers)):
        origin, steps = trail(cuts, layer)
        prefix = f"{job.row}{origin}."
        roles = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        block = f"{job.row}{layer}"
        student[block] = {f"{block}.{role}": Derived(prefix + role, role, steps) for role in roles}
    return student


def _sections(job: Job) -> list[Section]:
    """The sizes of what will be written; no choice changes them, so that stand-ins do."""
    student = _student(job, _chain(job, None)[1])
    return [
        Section(name, {tensor: derived.nbytes(job.source) for tensor, derived in tensors.items()})
        for name, tensors in student.items()
    ]


def _write(job: Job, cuts: tuple[Cut, ...], writer: Writer) -> None:
    """Read, cut and write what the writer does not hold yet.

    Raises InputError where an unfinished run had chosen otherwise: a student of two minds would load, and be wrong.
    """
    choice = _digest(cuts)
    done = writer.done
    if done and writer.record(done[0])["choice"] != choice:
        raise InputError(
            f"{writer.partial}: importances measured anew choose other layers, heads or channels than the unfinished "
            "run did: give --restart to discard it"
        )
    for section, tensors in _student(job, cuts).items():
        if section not in done:
            made = {name: derived.read(job.source) for name, derived in tensors.items()}
            writer.write(section, made, {"choice": choice})


def _described(job: Job, config: dict[str, Any], cuts: tuple[Cut, ...]) -> dict[str, Any]:
    """What is known of a cut without its measurement."""
    dtype = dominant_dtype(job.source.tensors)
    before = sum(prod(info.shape) for name, info in job.source.tensors.items() if name not in job.dropped)
    student = _student(job, cuts)
    after = sum(prod(derived.shape(job.source)) for tensors in student.values() for derived in tensors.values())
    size = config["intermediate_size"]
    notes = [f"intermediate_size {size} is no multiple of 64, which kernels like best"] if size % 64 else []
    return {
        "stages": [{"method": stage.method, **stage.settings.model_dump(mode="json")} for stage in job.stages],
        "sizes": {name: {"before": job.config[name], "after": config[name]} for name in SIZES},
        "parameters": {"before": before, "after": after},
        "kv_bytes_per_token": {"before": _cache(job.config, dtype), "after": _cache(config, dtype)},
        "kv_dtype": str(dtype).removeprefix("torch."),
        "notes": notes if size != job.config["intermediate_size"] else [],
    }


@dataclass(frozen=True)
class _CacheSizes:
    """The sizes in a config.json that its key-value cache follows from."""

    layer_count: int
    kv_heads: int
    head_dim: int


def _cache(config: dict[str, Any], dtype: torch.dtype) -> int:
    sizes = _CacheSizes(config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"])
    return kv_bytes_per_token(sizes, dtype.itemsize)


def _chosen(job: Job, cuts: tuple[Cut, ...], measured: Measured) -> dict[str, Any]:
    """What a cut has kept: the source's layer behind each layer, heads, and the shares of importance that stay.

    importance: per layer of the source. importance_kept: per layer of the student, of its heads' or channels' sum.
    """
    kept: dict[str, list[float]] = {}
    values: Measured = measured
    heads: dict[str, Any] = {}
    for made in cuts:
        for name, kind in MEASURED.items():
            if name in values and kind in made.units:
                rows = values[name][list(made.layers)]
                kept[name] = [share_kept(row, units) for row, units in zip(rows, made.units[kind], strict=True)]
        heads |= {kind: [row.tolist() for row in units] for kind, units in made.units.items() if kind != CHANNEL}
        values = made.carry(values)
    layers = [trail(cuts, layer)[0] for layer in range(len(cuts[-1].layers))]
    importance = {name: row.tolist() for name, row in measured.items() if not MEASURED[name]}
    return {"layers_kept": layers, "heads_kept": heads, "importance": importance, "importance_kept": kept}


def _tokens(ids: Tensor | None, wanted: frozenset[str]) -> dict[str, Any] | None:
    return {"samples": len(ids), "seqlen": ids.shape[1]} if ids is not None and wanted else None


def _fingerprint(job: Job, ids: Tensor | None, device: torch.device) -> str:
    """What must be equal for an unfinished run to be gone on with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    stages = [[stage.method, stage.settings.model_dump(mode="json")] for stage in job.stages]
    tokens = "" if ids is None else texts.fingerprint(ids)
    parts = [json.dumps(stages), identity(job.source), tokens, name, str(arithmetic(device))]
    parts += [f"{package} {version(package)}" for package in PACKAGES]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _digest(cuts: tuple[Cut, ...]) -> str:
    """A hash of every choice that was made."""
    told = [
        [made.layers, {kind: [row.tolist() for row in units] for kind, units in sorted(made.units.items())}]
        for made in cuts
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
