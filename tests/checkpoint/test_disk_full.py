"""A full, failing or read-only disk: one line that names the path and the bytes, and a partial that goes on later."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from compress.checkpoint import Section, Writer
from compress.errors import InputError
from tests.checkpoint.sample import contents, open_writer, plan, run

COUNT = 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of one MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here ({mounted.stderr.strip()}); the simulated full disk still runs")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_simulated_full_disk_at_every_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = contents(run(tmp_path / "whole", COUNT))
    real = os.pwrite
    budget = 0

    def limited(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal budget
        if budget == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = real(descriptor, data[:budget], offset)  # short writes, as a disk makes them before it is full
        budget -= count
        return count

    monkeypatch.setattr(os, "pwrite", limited)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    output, failures = tmp_path / "out", 0
    while not output.exists():
        budget = 400 * (failures + 1)  # each time somebody has made a little more room
        try:
            run(output, COUNT)
        except InputError as error:
            failures += 1
            message = str(error)
            assert str(tmp_path / "out.partial") in message and "the disk is full" in message and "\n" not in message
            if failures == 2:  # the first fails at the journal's first line
                planned = sum(section.nbytes for section in plan(COUNT))
                assert f"{planned} bytes more are needed" in message
            assert not output.exists() and failures < 100
    assert failures > 10
    assert contents(output) == wanted


def test_the_same_writer_goes_on_after_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = Writer(tmp_path / "out", [Section("s", {"a": 8})], "recipe")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(InputError, match="the disk is full, 8 bytes more are needed"):
            writer.write("s", {"a": torch.ones(2)}, {})
    writer.write("s", {"a": torch.ones(2)}, {})
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(InputError, match="the disk is full: free some space"):
            writer.finish({})
    assert not (tmp_path / "out").exists()
    assert writer.finish({}).exists()


class Usage(NamedTuple):
    """What shutil.disk_usage returns."""

    total: int
    used: int
    free: int


def test_room_is_checked_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**9, 0, 10**9))
    with pytest.raises(InputError, match=r"out.partial: needs 2000000384 bytes, the disk has 1000000000 free"):
        Writer(tmp_path / "out", [Section("s", {"a": 2 * 10**9})], "recipe")
    assert list(contents(tmp_path)) == ["out.partial/journal.jsonl"]
    assert contents(tmp_path)["out.partial/journal.jsonl"] == b""


def test_other_failures_name_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    writer = Writer(tmp_path / "out", [Section("s", {"a": 8})], "recipe")
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(InputError, match=r"out.partial: cannot be used \(Input/output error\): check its permissions"):
        writer.write("s", {"a": torch.ones(2)}, {})


def test_a_real_disk_without_room_for_the_plan(small_disk: Path) -> None:
    with pytest.raises(InputError, match="out.partial: needs 2000384 bytes, the disk has .* free"):
        Writer(small_disk / "out", [Section("s", {"a": 2 * 10**6})], "recipe")


def test_a_real_disk_that_fills_up(small_disk: Path) -> None:
    sections = [Section(str(number), {f"{number}.a": 200_000}) for number in range(3)]
    tensors = [{f"{number}.a": torch.full((200_000,), number, dtype=torch.uint8)} for number in range(3)]
    writer = Writer(small_disk / "out", sections, "recipe")
    writer.write("0", tensors[0], {})
    (small_disk / "guest").write_bytes(bytes(700_000))
    with pytest.raises(InputError, match="the disk is full, 400000 bytes more are needed"):
        writer.write("1", tensors[1], {})
    assert not (small_disk / "out").exists()
    (small_disk / "guest").unlink()
    again = Writer(small_disk / "out", sections, "recipe")
    for number in range(len(again.done), 3):
        again.write(str(number), tensors[number], {})
    assert (again.finish({}) / "model.safetensors").stat().st_size > 600_000


def test_a_real_disk_that_is_read_only(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(InputError, match=r"out.partial: cannot be used \(Read-only file system\)"):
        open_writer(small_disk / "out", 1)


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str, *args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "makedirs", refused)  # root, as which containers run tests, may write anywhere
    with pytest.raises(InputError, match=r"out.partial: cannot be used \(Permission denied\): check its permissions"):
        open_writer(tmp_path / "out", 1)
