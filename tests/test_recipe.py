"""Recipes: every key checked, every default spelt out, one hash wherever they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from compress import methods
from compress.errors import InputError
from compress.formats.grid import Grid
from compress.recipe import Recipe, Timed, json_schema, load, parse, shipped, to_yaml


def document(**changes: Any) -> dict[str, Any]:
    """A recipe of one GPTQ stage; `changes` go into its quantize mapping."""
    return {"version": 1, "stages": [{"quantize": {"method": "gptq", "scheme": "W4A16"} | changes}]}


def complaint(data: Any, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        parse(data, "r.yaml", overrides)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_the_fields() -> None:
    recipe = parse(document(), "r.yaml")
    stage = recipe.stages[0]
    assert (recipe.calibration.source, recipe.calibration.samples, recipe.calibration.seqlen) == ("self", 128, 2048)
    assert (recipe.export.format, recipe.export.scale_dtype, recipe.export.shard_bytes) == ("native", "auto", 1 << 32)
    assert (stage.kind, stage.method, stage.targets, stage.ignore) == ("quantize", "gptq", ("*",), ())
    assert stage.scheme is not None and stage.scheme.grid == Grid(4, True, 128)
    assert (stage.settings.damping, stage.settings.block_size) == (0.01, 128)  # type: ignore[attr-defined]
    assert stage.needs == {"hessian"}
    assert stage.where == "r.yaml: stages.0"


def test_what_a_method_needs_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = parse(document(), "r.yaml").stages[0]
    assert stage.needs == {"hessian"}
    monkeypatch.setattr(methods, "find", lambda kind, name: pytest.fail("looked up again"))
    assert stage.needs == {"hessian"}


def test_settings_scheme_and_scope_are_parted() -> None:
    data = document(group_size=64, damping=0.05)
    data["stages"][0] |= {"targets": ["*.mlp.*"], "ignore": ["re:.*down.*"]}
    stage = parse(data, "r.yaml").stages[0]
    assert stage.scheme is not None and stage.scheme.grid.group_size == 64
    assert stage.settings.damping == 0.05  # type: ignore[attr-defined]
    assert (stage.targets, stage.ignore) == (("*.mlp.*",), ("re:.*down.*",))


def test_channel_is_no_group() -> None:
    stage = parse(document(group_size="channel"), "r.yaml").stages[0]
    assert stage.scheme is not None and stage.scheme.grid.group_size is None
    assert stage.resolved()["quantize"]["group_size"] == "channel"


def test_overrides_reach_into_stages() -> None:
    recipe = parse(document(), "r.yaml", ["stages.0.quantize.group_size=32", "calibration.samples=3"])
    assert recipe.stages[0].scheme is not None and recipe.stages[0].scheme.grid.group_size == 32
    assert recipe.calibration.samples == 3


@pytest.mark.parametrize("name", list(shipped()))
def test_resolved_recipes_load_again_as_equals(name: str) -> None:
    recipe = load(name)
    again = parse(recipe.resolved(), "again")
    assert again == recipe and again.sha256() == recipe.sha256()
    assert parse(yaml.safe_load(to_yaml(recipe)), "yaml") == recipe
    assert json.loads(json.dumps(recipe.resolved())) == recipe.resolved()


def test_hash_is_of_the_work_not_the_place() -> None:
    recipe = parse(document(), "r.yaml")
    assert recipe.sha256() == recipe.at("/somewhere", "/else").sha256() == parse(document(damping=0.01), "x").sha256()
    assert recipe.sha256() != parse(document(damping=0.02), "r.yaml").sha256()


def test_at_replaces_only_what_is_given() -> None:
    recipe = parse(document() | {"model": "a", "output": "b"}, "r.yaml")
    assert (recipe.at(None, None).model, recipe.at("c", None).model, recipe.at("c", "d").output) == ("a", "c", "d")


def test_model_placeholder() -> None:
    recipe = parse(document(), "r.yaml")
    assert recipe.expand("plain.txt") == "plain.txt"
    assert recipe.at("/models/m", None).expand("{model}/texts/web.txt") == "/models/m/texts/web.txt"
    with pytest.raises(InputError, match="field 'model' is missing.*give --model"):
        recipe.expand("{model}/x")


def test_recipes_are_values() -> None:
    recipe = parse(document(), "r.yaml")
    with pytest.raises(ValueError, match="frozen"):
        recipe.model = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([{"version": 1}], "r.yaml: a recipe is a mapping of keys, this is a list: begin with 'version: 1'"),
        (None, "r.yaml: a recipe is a mapping of keys, this is empty: begin with 'version: 1'"),
        ({"version": 1, "stages": []}, "r.yaml: field 'stages' is empty: name at least one stage"),
        ({"version": 1}, "r.yaml: field 'stages' is missing: give it a value"),
        ({"version": 1, "stages": None}, "r.yaml: field 'stages' is None: give a list"),
        (document() | {"version": 2}, "r.yaml: field 'version' is 2: it should be 1"),
        (
            {"version": 1, "stage": [], "stages": []},
            "r.yaml: field 'stage' is unknown; did you mean 'stages'? "
            "Known: version, model, output, calibration, stages, export, evaluate",
        ),
        (
            {"version": 1, "stages": [{"quantise": {}}]},
            "r.yaml: field 'stages.0.quantise' is unknown; did you mean 'quantize'? "
            "Known: shrink, transform, prune, quantize, distill, targets, ignore",
        ),
        (
            {"version": 1, "stages": [{"targets": ["*"]}]},
            "r.yaml: field 'stages.0' has none of shrink, transform, prune, quantize, distill: give exactly one",
        ),
        (
            {"version": 1, "stages": [{"transform": {}, "quantize": {}}]},
            "r.yaml: field 'stages.0' has transform and quantize of shrink, transform, prune, quantize, distill: "
            "give exactly one",
        ),
        (
            {"version": 1, "stages": ["gptq"]},
            "r.yaml: field 'stages.0' is 'gptq': a stage is a mapping such as {quantize: {method: ...}}",
        ),
        (
            {"version": 1, "stages": [{"quantize": "gptq"}]},
            "r.yaml: field 'stages.0.quantize' is 'gptq': give a mapping such as {method: ...}",
        ),
        (
            {"version": 1, "stages": [{"quantize": {"method": "rtn"}}]},
            "r.yaml: field 'stages.0.quantize.scheme' is missing: give it a value",
        ),
        (document(method="gtpq"), "r.yaml: field stages.0.quantize.method: 'gtpq' is not known; did you mean 'gptq'?"),
        (document(scheme="W4A61"), "r.yaml: field stages.0.quantize.scheme: 'W4A61' is not known; did you mean"),
        (document(group_size=0), "r.yaml: field stages.0.quantize.group_size: 0 is not positive"),
        (document(scheme="W8A8", group_size=64), "r.yaml: field stages.0.quantize.group_size: 64 given, but W8A8"),
        (document(group_size="row"), "r.yaml: field 'stages.0.quantize.group_size' is 'row': it should be"),
        (document(dampng=0.1), "r.yaml: field 'stages.0.quantize.dampng' is unknown; did you mean 'damping'? Known:"),
        (document(damping=2), "r.yaml: field 'stages.0.quantize.damping' is 2: it should be less than or equal to 1"),
        (document(targets=["*"]), "r.yaml: field 'stages.0.quantize.targets' is misplaced: it stands beside"),
    ],
)
def test_mistakes_are_named(data: Any, message: str) -> None:
    assert complaint(data).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("calibration.sampels=3", "r.yaml: field 'calibration.sampels' is unknown; did you mean 'samples'?"),
        ("calibration.samples=0", "r.yaml: field 'calibration.samples' is 0: it should be greater than"),
        ("evaluate.text=a.txt", "r.yaml: field 'evaluate.text' is 'a.txt': give a list"),
        ("export.format=gguf", "r.yaml: field 'export.format' is 'gguf': it should be 'native'"),
        ("stages.0.targets=[]", "r.yaml: field 'stages.0.targets' is []: give an entry"),
        ("stages.1.ignore=[]", "--set stages.1.ignore=[]: '1' is not an index into 1 entries from 0"),
    ],
)
def test_overridden_mistakes_are_named(change: str, message: str) -> None:
    assert complaint(document(), change).startswith(message)


def test_file_mistakes_are_named(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("version: 1\nstages:\n  - quantize: {method: gptq, scheme: W4A16}\nversion: 1\n")
    with pytest.raises(InputError, match=r"r\.yaml: line 4: field 'version' is given twice: keep one"):
        load(file)
    with pytest.raises(InputError, match="w4a16_gtpq: no such recipe; did you mean 'w4a16_gptq'"):
        load("w4a16_gtpq")


def test_schema_describes_every_key() -> None:
    schema = json_schema()
    assert list(schema["properties"]) == list(Recipe.model_fields)
    for kind, stage in zip(methods.KINDS, schema["properties"]["stages"]["items"]["oneOf"], strict=True):
        bodies = {body["title"]: body for body in stage["properties"][kind]["oneOf"]}
        assert sorted(bodies) == methods.names(kind)
        for name, body in bodies.items():
            assert set(methods.find(kind, name).Config.model_fields) | {"method"} <= set(body["properties"])
            assert body["additionalProperties"] is False and "method" in body["required"]
            assert ("scheme" in body["required"]) == (kind == "quantize")
    references = [part.partition('"')[0] for part in json.dumps(schema).split('"#/$defs/')[1:]]
    assert set(references) <= set(schema["$defs"])


def test_a_threshold_of_outliers_reaches_the_scheme() -> None:
    stage = {"quantize": {"method": "llm_int8", "scheme": "LLM_INT8", "threshold": 2.5}}
    recipe = parse({"version": 1, "stages": [stage]}, "recipe.yaml")
    assert recipe.stages[0].scheme is not None and recipe.stages[0].scheme.threshold == 2.5
    assert parse(recipe.resolved(), "again") == recipe


def test_a_bench_is_optional_and_checked_key_by_key() -> None:
    assert parse(document(), "r.yaml").evaluate.bench is None
    data = document() | {"evaluate": {"bench": {}}}
    assert parse(data, "r.yaml").evaluate.bench == Timed(batch=(1, 4), prompt=512, new=128, repeat=5)
    recipe = parse(data, "r.yaml", ["evaluate.bench.batch=[1, 16]", "evaluate.bench.new=7"])
    assert recipe.evaluate.bench == Timed(batch=(1, 16), new=7)
    assert parse(recipe.resolved(), "r.yaml") == recipe
    assert "field 'evaluate.bench.batch' is" in complaint(data, "evaluate.bench.batch=[]")
    assert "evaluate.bench.batch" in complaint(data, "evaluate.bench.batch=[0]")
    assert "did you mean 'prompt'" in complaint(data, "evaluate.bench.promt=3")
