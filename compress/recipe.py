"""Recipes: what to do to a model, as YAML or JSON, checked key by key before anything is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, InstanceOf, WithJsonSchema, field_validator

from compress.document import Place, override, read, refuse_unknown, validate
from compress.errors import USAGE, InputError, did_you_mean
from compress.stage import Stage, parse_stage, stage_schemas

SHIPPED = "compress.recipes"


class Calibration(BaseModel):
    """Which tokens feed the statistics.

    source: a text, JSON-lines or Parquet file, a folder of them, a dataset's name, or `self`: text the model writes.
    samples: sequences of `seqlen` tokens each. seed: of the choice of sequences, and of sampling where source is self.
    chat: put each text through the tokenizer's chat template.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(default="self", min_length=1)
    samples: int = Field(default=128, ge=1)
    seqlen: int = Field(default=2048, ge=2)
    seed: int = Field(default=0, ge=0)
    chat: bool = False


class Export(BaseModel):
    """How the checkpoint is written.

    scale_dtype: `auto` is the model's own. shard_bytes: bound of one safetensors file. kernels: targets whose binaries
    travel in the checkpoint; `host` is the CPU of the machine that runs the recipe. kv_cache: type of the keys and
    values that the runtime keeps while it generates; int8 has one scale per token and head.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["native"] = "native"
    scale_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    shard_bytes: int = Field(default=4 << 30, ge=1)
    kernels: tuple[Literal["host", "sm_80", "sm_90", "sm_100", "gfx942"], ...] = ()
    kv_cache: Literal["f32", "bf16", "int8"] = "f32"

    @field_validator("kernels")
    @classmethod
    def _each_once(cls, kernels: tuple[str, ...]) -> tuple[str, ...]:
        twice = next((name for name in kernels if kernels.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice} is given twice: keep one")
        return kernels


class Timed(BaseModel):
    """What is timed on the result: `new` tokens behind a prompt of `prompt`, at each batch size, `repeat` times."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(1, 4), min_length=1)
    prompt: int = Field(default=512, ge=1)
    new: int = Field(default=128, ge=1)
    repeat: int = Field(default=5, ge=1)


class Evaluate(BaseModel):
    """What is measured on the result.

    text: files (none: nothing), read in windows of `context` tokens, at most `tokens` of each.
    bench: what is timed; without it a short timing goes with whatever else is measured.
    gates: conditions on the report such as `ppl_ratio <= 1.05`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: tuple[str, ...] = ()
    context: int = Field(default=512, ge=2)
    tokens: int | None = Field(default=None, ge=2)
    bench: Timed | None = None
    gates: tuple[str, ...] = ()


class Recipe(BaseModel):
    """A whole recipe. `model` and `output` may be left to the command line."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1]
    model: str | None = None
    output: str | None = None
    calibration: Calibration = Calibration()
    stages: Annotated[tuple[InstanceOf[Stage], ...], Field(min_length=1), WithJsonSchema({"type": "array"})]
    export: Export = Export()
    evaluate: Evaluate = Evaluate()

    def resolved(self) -> dict[str, Any]:
        """The recipe with every default spelt out, as JSON types; loading it again gives an equal recipe."""
        plain = self.model_dump(mode="json", exclude={"stages"})
        stages = [stage.resolved() for stage in self.stages]
        return {key: stages if key == "stages" else plain[key] for key in type(self).model_fields}

    def sha256(self) -> str:
        """Hash of the resolved recipe without `model` and `output`: the same wherever it runs."""
        resolved = {key: value for key, value in self.resolved().items() if key not in ("model", "output")}
        return hashlib.sha256(json.dumps(resolved, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def at(self, model: str | None, output: str | None) -> Recipe:
        """The same recipe with its folders replaced where they are given."""
        return self.model_copy(update={"model": model or self.model, "output": output or self.output})

    def expand(self, path: str) -> str:
        """`path` with `{model}` replaced by the model's folder. Relative paths count from where the run starts."""
        if "{model}" not in path:
            return path
        if self.model is None:
            raise InputError(f"recipe: field 'model' is missing, but {path!r} refers to it: give --model", USAGE)
        return path.replace("{model}", self.model)


def shipped() -> dict[str, Path]:
    """The recipes that come with the package: name -> file."""
    folder = Path(str(files(SHIPPED)))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, or a shipped recipe by name, and apply `a.b=c` overrides.

    Raises InputError naming the file, the field, its value and the mend.
    """
    file = Path(path)
    if not file.exists():
        known = shipped()
        if str(path) not in known:
            hint = did_you_mean(str(path), known) or f": give a file, or one of {', '.join(known)}"
            raise InputError(f"{path}: no such recipe{hint}", USAGE)
        file = known[str(path)]
    return parse(read(file), str(path), overrides)


def parse(document: Any, name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from plain data. `name` is what messages call it."""
    if not isinstance(document, dict):
        kind = "empty" if document is None else f"a {type(document).__name__}"
        raise InputError(f"{name}: a recipe is a mapping of keys, this is {kind}: begin with 'version: 1'", USAGE)
    document = override(document, overrides)
    place = Place(name)
    refuse_unknown(document, tuple(Recipe.model_fields), place)
    stages = document.get("stages")
    if isinstance(stages, list):
        document["stages"] = tuple(parse_stage(raw, place.at("stages", i)) for i, raw in enumerate(stages))
        if not stages:
            raise place.at("stages").error("is empty: name at least one stage")
    return validate(Recipe, document, place)


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe as YAML; loading it gives an equal recipe."""
    return yaml.safe_dump(recipe.resolved(), sort_keys=False, width=120)


def json_schema() -> dict[str, Any]:
    """JSON schema of a recipe, every method's settings included."""
    schema = Recipe.model_json_schema()
    kinds = stage_schemas(schema["$defs"])
    schema["properties"]["stages"] = {"type": "array", "minItems": 1, "items": {"oneOf": kinds}}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
