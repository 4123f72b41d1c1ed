"""YAML in, plain data or one line of complaint out."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, Field

from compress.document import Place, override, read, validate
from compress.errors import InputError


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")

    size: int = Field(default=1, ge=1)
    kind: int | str | None = None


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    inner: Inner = Inner()
    words: tuple[str, ...] = ()
    name: str


def write(folder: Path, text: str | bytes) -> Path:
    file = folder / "file.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def test_reads_yaml_with_aliases_and_merges(tmp_path: Path) -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [*a, *a]\n"
    assert read(write(tmp_path, text)) == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": [{"x": 1, "y": 2}] * 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: field 'a' is given twice: keep one"),
        ("a:\n  - b: 1\n    c: 2\n    b: 1\n", "line 4: field 'b' is given twice: keep one"),
        ("a: [1, 2\n", "line 2: not YAML (expected ',' or ']', but got '<stream end>'): mend the syntax"),
        ("a: !!python/object/apply:os.system [ls]\n", "line 1: not YAML (could not determine a constructor"),
        (b"\xff\xfe\x00", "not readable (not UTF-8 text): give a YAML file"),
    ],
    ids=["duplicate", "duplicate in a list", "syntax", "code", "binary"],
)
def test_complains_in_one_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read(file)
    assert str(caught.value).startswith(f"{file}: {message}")
    assert caught.value.exit_code == 2


def test_a_folder_is_not_a_document(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not readable \(Is a directory\)"):
        read(tmp_path)


def test_override_sets_copies_and_creates() -> None:
    document = {"a": {"b": 1}, "list": [{"x": 1}, 2]}
    changed = override(document, ["a.b=2", "list.0.x=[1, {y: z}]", "list.1=null", "new.deep.key=1.5", "text=a=b"])
    assert changed == {
        "a": {"b": 2},
        "list": [{"x": [1, {"y": "z"}]}, None],
        "new": {"deep": {"key": 1.5}},
        "text": "a=b",
    }
    assert document == {"a": {"b": 1}, "list": [{"x": 1}, 2]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("a", "--set a: write it as path.to.key=value"),
        ("=1", "--set =1: write it as path.to.key=value"),
        ("a..b=1", "--set a..b=1: write it as path.to.key=value"),
        ("a=[1", "--set a=[1: line 1: not YAML (expected ',' or ']', but got '<stream end>'): mend the syntax"),
        ("list.2=1", "--set list.2=1: '2' is not an index into 2 entries from 0"),
        ("list.x.y=1", "--set list.x.y=1: 'x' is not an index into 2 entries from 0"),
        ("a.b=1", "--set a.b=1: 'a' is 3, which has no keys: set it whole"),
    ],
)
def test_override_complains(change: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        override({"a": 3, "list": [1, 2]}, [change])
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "n", "nam": 1}, "field 'nam' is unknown; did you mean 'name'? Known: inner, words, name"),
        ({"name": "n", "inner": {"sise": 1}}, "field 'inner.sise' is unknown; did you mean 'size'? Known: size, kind"),
        ({"name": "n", "zzz": 1}, "field 'zzz' is unknown. Known: inner, words, name"),
        ({}, "field 'name' is missing: give it a value"),
        ({"name": "n", "inner": {"size": 0}}, "field 'inner.size' is 0: it should be greater than or equal to 1"),
        ({"name": "n", "inner": 3}, "field 'inner' is 3: give a mapping of keys"),
        ({"name": "n", "words": "one"}, "field 'words' is 'one': give a list"),
        ({"name": "n", "words": ["a", 2]}, "field 'words.1' is 2: it should be a valid string"),
        (
            {"name": "n", "inner": {"kind": [1]}},
            "field 'inner.kind' is [1]: it should be a valid integer or it should be a valid string",
        ),
    ],
)
def test_validation_names_the_field_the_value_and_the_mend(data: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        validate(Outer, data, Place("file.yaml"))
    assert str(caught.value) == f"file.yaml: {message}"
