"""Stages of a recipe: a method of one kind, its settings, and what it works on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from compress import methods
from compress.document import Place, refuse_unknown, short, validate
from compress.errors import USAGE, InputError
from compress.formats.pattern import Pattern, pattern_named
from compress.formats.scheme import Scheme, scheme_named
from compress.training_settings import Data, Teacher, Training


@dataclass(frozen=True)
class Term:
    """One loss of a distill stage, with its share of the whole."""

    method: str
    settings: BaseModel
    weight: float = 1.0

    def resolved(self) -> dict[str, Any]:
        return {"method": self.method, "weight": self.weight, **self.settings.model_dump(mode="json")}


@dataclass(frozen=True)
class Distillation:
    """What a distill stage says beside its loss: further losses, the data, the teacher and the training."""

    weight: float
    mix: tuple[Term, ...]
    data: Data
    teacher: Teacher
    training: Training


@dataclass(frozen=True)
class Stage:
    """One step: a method, its settings, and the modules it works on.

    targets and ignore: globs over module names, class names, or `re:` patterns; ("*",) is every Linear of the decoder
    blocks. scheme: of quantize stages only. pattern and keep_dense (the share of the layers, those that pruning hurts
    most, which stay dense): of prune stages only. distillation: of distill stages only. where: the stage's place, for
    messages.
    """

    kind: str
    method: str
    settings: BaseModel
    scheme: Scheme | None = None
    pattern: Pattern | None = None
    keep_dense: float = 0.0
    distillation: Distillation | None = None
    targets: tuple[str, ...] = ("*",)
    ignore: tuple[str, ...] = ()
    where: str = field(default="stages", compare=False, repr=False)

    @cached_property
    def needs(self) -> frozenset[str]:
        """What the method wants measured; of kinds that work block by block: statistics of the layers' inputs."""
        return frozenset(methods.find(self.kind, self.method).NEEDS)

    @property
    def distilling(self) -> Distillation:
        """What a distill stage says beside its loss."""
        assert self.distillation is not None, "of distill stages only"
        return self.distillation

    @property
    def terms(self) -> tuple[Term, ...]:
        """All losses of a distill stage, its own first."""
        return (Term(self.method, self.settings, self.distilling.weight), *self.distilling.mix)

    def resolved(self) -> dict[str, Any]:
        """The stage as it would stand in a recipe, every default spelt out."""
        body: dict[str, Any] = {"method": self.method}
        if self.scheme is not None:
            body |= {"scheme": self.scheme.name, "group_size": self.scheme.grid.group_size or "channel"}
        if self.pattern is not None:
            body |= {"pattern": str(self.pattern), "keep_dense": self.keep_dense}
        body |= self.settings.model_dump(mode="json")
        if self.distillation is not None:
            body |= {"weight": self.distillation.weight, "mix": [term.resolved() for term in self.distillation.mix]}
            groups = ("data", "teacher", "training")
            body |= {name: getattr(self.distillation, name).model_dump(mode="json") for name in groups}
        scope = {"targets": list(self.targets), "ignore": list(self.ignore)}
        return {self.kind: body} | (scope if self.kind in SCOPED else {})


# Kinds that work on chosen linear layers, block by block, and may say on which.
SCOPED = ("transform", "prune", "quantize")


class _Head(BaseModel):
    """Keys that every method has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str


class _Quantize(BaseModel):
    """Keys that every quantizer shares. group_size: columns per scale, or `channel` for one scale per row."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    scheme: str
    group_size: int | Literal["channel"] | None = None


class _Prune(BaseModel):
    """Keys that every pruner shares. pattern: kept columns of a group, such as 2:4. keep_dense: share of the layers
    that stay dense, those whose pruning alone moves the model most."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    pattern: str = "2:4"
    keep_dense: float = Field(default=0.0, ge=0, lt=1)


class _Mixed(BaseModel):
    """Keys of a further loss. weight: its share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    weight: float = Field(default=1.0, gt=0)


class _Distill(BaseModel):
    """Keys that every loss shares. mix: further losses. data, teacher, training: see there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    weight: float = Field(default=1.0, gt=0)
    mix: tuple[dict[str, Any], ...] = ()
    data: Data = Data()
    teacher: Teacher = Teacher()
    training: Training = Training()


class _Scope(BaseModel):
    """Keys beside the method: which modules."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    targets: tuple[str, ...] = Field(default=("*",), min_length=1)
    ignore: tuple[str, ...] = ()


Head = _Head | _Quantize | _Prune | _Mixed | _Distill
HEADS: dict[str, type[Head]] = {"quantize": _Quantize, "prune": _Prune, "distill": _Distill}


def stage_schemas(definitions: dict[str, Any]) -> list[dict[str, Any]]:
    """JSON schemas of the stages of every kind; what they refer to is added to `definitions`."""
    patterns = {"type": "array", "items": {"type": "string"}}
    kinds = []
    for kind in methods.KINDS:
        bodies = [_body_schema(kind, method, definitions) for method in methods.names(kind)]
        scope = {"targets": patterns, "ignore": patterns} if kind in SCOPED else {}
        properties = {kind: {"oneOf": bodies}, **scope}
        kinds.append({"type": "object", "properties": properties, "required": [kind], "additionalProperties": False})
    return kinds


def _body_schema(kind: str, method: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Schema of the mapping under `kind`; what it refers to is added to `definitions`."""
    head = HEADS.get(kind, _Head)
    body = methods.find(kind, method).Config.model_json_schema()
    definitions |= body.pop("$defs", {})
    shared = head.model_json_schema()
    definitions |= shared.pop("$defs", {})
    properties = shared["properties"] | {"method": {"const": method}} | body.get("properties", {})
    required = [key for key, field in head.model_fields.items() if field.is_required()]
    return body | {"title": method, "properties": properties, "required": required}


def parse_stage(raw: Any, place: Place) -> Stage:
    """One entry of a recipe's `stages`. Raises InputError naming the field, its value and the mend."""
    if not isinstance(raw, dict):
        raise place.error(f"is {short(raw)}: a stage is a mapping such as {{quantize: {{method: ...}}}}")
    refuse_unknown(raw, (*methods.KINDS, *_Scope.model_fields), place)
    kinds = [kind for kind in methods.KINDS if kind in raw]
    if len(kinds) != 1:
        raise place.error(f"has {' and '.join(kinds) or 'none'} of {', '.join(methods.KINDS)}: give exactly one")
    kind, body, inner = kinds[0], raw[kinds[0]], place.at(kinds[0])
    if not isinstance(body, dict):
        raise inner.error(f"is {short(body)}: give a mapping such as {{method: ...}}")
    beside = {key: value for key, value in raw.items() if key != kind}
    misplaced = [key for key in body if key in _Scope.model_fields and kind in SCOPED]
    if misplaced:
        raise inner.at(misplaced[0]).error(f"is misplaced: it stands beside {kind!r}, not inside")
    if beside and kind not in SCOPED:
        raise place.at(next(iter(beside))).error(
            f"has no meaning beside {kind!r}, which takes the whole model: leave it out"
        )
    head, config = _method(kind, HEADS.get(kind, _Head), body, inner)
    scope = validate(_Scope, beside, place)
    stage = Stage(kind, head.method, config, targets=scope.targets, ignore=scope.ignore)
    stage = replace(stage, where=f"{place.document}: {place.path}")
    try:
        if isinstance(head, _Quantize):
            return replace(stage, scheme=_scheme(head, config))
        if isinstance(head, _Prune):
            return replace(stage, pattern=pattern_named(head.pattern), keep_dense=head.keep_dense)
    except InputError as error:
        raise InputError(f"{place.document}: field {inner.path}.{error}", USAGE) from error
    if isinstance(head, _Distill):
        mix = tuple(_term(raw, inner.at("mix", number)) for number, raw in enumerate(head.mix))
        return replace(stage, distillation=Distillation(head.weight, mix, head.data, head.teacher, head.training))
    return stage


def _method(kind: str, head_type: type[Head], body: Mapping[str, Any], place: Place) -> tuple[Head, BaseModel]:
    """The keys of `body` that all methods of `kind` share, and those of its method's own Config."""
    shared = tuple(head_type.model_fields)
    head = validate(head_type, {key: value for key, value in body.items() if key in shared}, place)
    try:
        method = methods.find(kind, head.method)
    except InputError as error:
        raise InputError(f"{place.document}: field {place.path}.{error}", USAGE) from error
    settings = {key: value for key, value in body.items() if key not in shared}
    refuse_unknown(settings, (*shared, *method.Config.model_fields), place)
    return head, validate(method.Config, settings, place)


def _term(raw: Mapping[str, Any], place: Place) -> Term:
    """A further loss of a distill stage."""
    head, config = _method("distill", _Mixed, raw, place)
    assert isinstance(head, _Mixed)
    return Term(head.method, config, head.weight)


def _scheme(head: _Quantize, config: BaseModel) -> Scheme:
    """The scheme that a quantize stage names."""
    scheme = scheme_named(head.scheme, head.group_size)
    if scheme.threshold is None:
        return scheme
    # A method that looks for outliers says from which magnitude on; the checkpoint repeats it to the runtime.
    return replace(scheme, threshold=getattr(config, "threshold", scheme.threshold))
