"""Kernels in a checkpoint folder: what is written reads back, and whatever was changed is refused by name."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compress.errors import InputError
from compress.kernels.exported import (
    FOLDER,
    MANIFEST,
    Built,
    Entry,
    Finding,
    exported_files,
    read_binary,
    read_manifest,
    verify,
    write,
)

SOURCE = "5" * 64


def built(name: str = "w4a16", target: str = "sm_90", binary: bytes = b"\x7fELF machine code") -> Built:
    entry = Entry(
        file=f"{name}.{target}.cubin",
        name=name,
        target=target,
        platform=None,
        format="pack-quantized",
        symbol="kernel_0",
        threads=128,
        shared_bytes=1024,
        arguments=(("x", "*bf16"), ("rows", "i32"), ("scratch", "*i8")),
        constants={"BLOCK": 64},
        nbytes=len(binary),
        sha256=hashlib.sha256(binary).hexdigest(),
        source_sha256=SOURCE,
        builder={"triton": "3.9.0"},
    )
    return Built(entry, binary)


def library(name: str = "avx2") -> Built:
    one = built(name, "host", b"a library")
    entry = replace(one.entry, file=f"{name}.linux-x86_64.so", platform="linux-x86_64", format=None, symbol=None)
    return Built(replace(entry, threads=0, shared_bytes=0, arguments=(), constants={}), one.binary)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder with two kernels and a library."""
    write(tmp_path, [built(), built("w8a8", binary=b"other code"), library()], ("sm_90", "host"))
    return tmp_path


def edit(folder: Path, change: Any) -> None:
    """Rewrite the manifest as `change` makes it."""
    file = folder / FOLDER / MANIFEST
    document = json.loads(file.read_text())
    changed = change(document)
    file.write_text(json.dumps(document if changed is None else changed))


def source_of(entry: Entry) -> str | None:
    return SOURCE


def test_what_is_written_reads_back(folder: Path) -> None:
    wanted = sorted([built(), built("w8a8", binary=b"other code"), library()], key=lambda one: one.entry.file)
    assert read_manifest(folder) == tuple(one.entry for one in wanted)
    assert [read_binary(folder, one.entry) for one in wanted] == [one.binary for one in wanted]
    assert verify(folder, source_of) == []


def test_files_are_the_same_whatever_the_order() -> None:
    kernels = [built(), built("w8a8"), library()]
    files = exported_files(kernels)
    assert files == exported_files(reversed(kernels)) and list(files) == list(exported_files(reversed(kernels)))
    assert f"{FOLDER}/w4a16.sm_90.cubin" in files
    with pytest.raises(ValueError, match="'w4a16.sm_90.cubin' is the file of two kernels"):
        exported_files([built(), built()])


def test_building_a_target_again_leaves_the_others(folder: Path) -> None:
    entries = write(folder, [built("attention", binary=b"new")], ("sm_90",))
    assert {entry.file for entry in entries} == {"attention.sm_90.cubin", "avx2.linux-x86_64.so"}
    assert sorted(os.listdir(folder / FOLDER)) == ["attention.sm_90.cubin", "avx2.linux-x86_64.so", MANIFEST]
    assert verify(folder, source_of) == []


@pytest.mark.parametrize("index", [0, 7, -1], ids=["first", "middle", "last"])
def test_a_flipped_byte_is_refused_by_name(folder: Path, index: int) -> None:
    file = folder / FOLDER / "w4a16.sm_90.cubin"
    content = bytearray(file.read_bytes())
    content[index] ^= 1
    file.write_bytes(content)
    (entry,) = (entry for entry in read_manifest(folder) if entry.file == file.name)
    with pytest.raises(InputError, match=r"kernels/w4a16.sm_90.cubin: .*was changed after it was built and is not run"):
        read_binary(folder, entry)
    (finding,) = verify(folder, source_of)
    assert finding[:2] == (file.name, "changed") and str(file) in finding.message


def test_verify_names_what_is_missing_extra_cut_and_stale(folder: Path) -> None:
    place = folder / FOLDER
    (place / "w4a16.sm_90.cubin").unlink()
    (place / "notes.txt").write_text("hello")
    (place / "avx2.linux-x86_64.so").write_bytes(b"a libra")

    def newer(entry: Entry) -> str | None:
        return None if entry.name == "w8a8" else SOURCE

    findings = verify(folder, newer)
    assert [finding[:2] for finding in findings] == [
        ("avx2.linux-x86_64.so", "changed"),
        ("w4a16.sm_90.cubin", "missing"),
        ("w8a8.sm_90.cubin", "stale"),
        ("notes.txt", "extra"),
    ]
    assert all(str(place / finding.file) in finding.message for finding in findings)
    assert "this lmpress has no such kernel" in findings[2].message
    stale = verify(folder, lambda entry: "6" * 64)
    assert [finding.problem for finding in stale] == ["changed", "stale", "missing", "stale", "extra"]
    assert isinstance(stale[1], Finding) and "another source" in stale[1].message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("file", "../evil.so"),
        ("file", "a/b.cubin"),
        ("file", "..cubin"),
        ("file", "/etc/passwd"),
        ("file", "a\\b.cubin"),
        ("file", MANIFEST),
        ("file", ""),
        ("file", 3),
        ("name", "a b"),
        ("symbol", "no-symbol"),
        ("threads", 1025),
        ("threads", -1),
        ("threads", True),
        ("threads", 1.0),
        ("shared_bytes", 1 << 20),
        ("nbytes", 1 << 40),
        ("arguments", [["x", "*void"]]),
        ("arguments", [["x"]]),
        ("arguments", "x"),
        ("constants", {"A": "1"}),
        ("sha256", "ab"),
        ("sha256", "G" * 64),
        ("builder", ["triton"]),
    ],
)
def test_fields_that_cannot_be_are_refused(folder: Path, field: str, value: Any) -> None:
    edit(folder, lambda document: document["kernels"][0].update({field: value}))
    with pytest.raises(InputError, match=rf"manifest.json: field 'kernels.0.{field}' is .*: build the kernels again"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema_version=2), "'schema_version' is 2, this lmpress reads 1"),
        (lambda d: d.update(schema_version=True), "'schema_version' is True"),
        (lambda d: d.pop("schema_version") and None, "'schema_version' is None"),
        (lambda d: d.update(more=1), "field 'more' is not as this lmpress writes it"),
        (lambda d: d.update(kernels={}), "field 'kernels' is not as"),
        (lambda d: d["kernels"].append(3), "'kernels.3' is not an object"),
        (lambda d: d["kernels"].append(d["kernels"][0]), "names the file 'avx2.linux-x86_64.so' twice"),
        (lambda d: d["kernels"].append(d["kernels"][1] | {"file": "b"}), "names the kernel and target"),
        (lambda d: d["kernels"][1].pop("symbol") and None, "'kernels.1.symbol' is missing"),
        (lambda d: d["kernels"][1].update(run="me"), "'kernels.1.run' is unknown"),
        (lambda d: [d], "is a JSON list, not an object"),
    ],
)
def test_manifests_that_are_not_ours_are_refused(folder: Path, change: Any, words: str) -> None:
    edit(folder, change)
    with pytest.raises(InputError, match=words) as caught:
        read_manifest(folder)
    assert "\n" not in str(caught.value)


def test_broken_json_and_no_kernels(folder: Path, tmp_path: Path) -> None:
    (folder / FOLDER / MANIFEST).write_text('{"schema_version": 1, "schema_version": 1, "kernels": []}')
    with pytest.raises(InputError, match="not valid JSON .a key is given twice"):
        read_manifest(folder)
    (folder / FOLDER / MANIFEST).unlink()
    with pytest.raises(InputError, match="manifest.json: cannot be read"):
        read_manifest(folder)
    with pytest.raises(InputError, match=r"holds no kernels: build some with `lmpress kernels build"):
        read_manifest(tmp_path / "nowhere")


def test_links_and_pipes_are_not_followed(folder: Path, tmp_path: Path) -> None:
    file = folder / FOLDER / "w4a16.sm_90.cubin"
    content = file.read_bytes()
    (entry,) = (entry for entry in read_manifest(folder) if entry.file == file.name)
    file.unlink()
    (tmp_path / "elsewhere").write_bytes(content)
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="cannot be read"):
        read_binary(folder, entry)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(InputError, match="no regular file"):
        read_binary(folder, entry)
