"""Killed at any moment, a run goes on to the same bytes: at every single disk call, and by real SIGKILLs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compress.errors import InputError
from tests.checkpoint.sample import SHARD_BYTES, contents, open_writer, run, section_tensors

COUNT = 4
DISK_CALLS = ("open", "pwrite", "fsync", "ftruncate", "replace", "unlink", "rmdir", "mkdir")


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the code under test may catch it."""


class MortalDisk:
    """Counts the disk calls made through `os` and dies before call number `last`, or half way through a write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int | None = None) -> None:
        self.calls = 0
        self._last = last
        for name in DISK_CALLS:
            monkeypatch.setattr(os, name, self._mortal(getattr(os, name), name))

    def _mortal(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self._last:
                if name == "pwrite":
                    descriptor, data, offset = args
                    real(descriptor, data[: len(data) // 2], offset)
                raise Killed
            return None if name == "fsync" else real(*args, **kwargs)

        return call


def run_until(
    monkeypatch: pytest.MonkeyPatch, last: int | None, output: Path, count: int = COUNT, restart: bool = False
) -> int:
    """Run on a disk that dies at call `last`, and return the calls made."""
    with monkeypatch.context() as patch:
        disk = MortalDisk(patch, last)
        try:
            run(output, count, restart=restart)
        except Killed:
            assert disk.calls == last
        return disk.calls


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return contents(run(tmp_path_factory.mktemp("whole") / "out", COUNT))


def test_a_kill_at_every_disk_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, bytes]) -> None:
    calls = run_until(monkeypatch, None, tmp_path / "count")
    assert calls > 60 and contents(tmp_path / "count") == wanted
    for last in range(1, calls + 1):
        output = tmp_path / f"killed {last}"
        run_until(monkeypatch, last, output)
        if output.exists():
            assert wanted.items() <= contents(output).items()  # whole, or not there
        run_until(monkeypatch, None, output)
        assert contents(output) == wanted, last
    assert not list(tmp_path.glob("*.partial"))


def test_a_kill_at_every_disk_call_of_a_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = contents(run(tmp_path / "whole", 1))
    old = contents(run(tmp_path / "old", 1, "old recipe"))
    shutil.copytree(tmp_path / "old", tmp_path / "count")
    calls = run_until(monkeypatch, None, tmp_path / "count", 1, restart=True)
    for last in range(1, calls + 1):
        output = tmp_path / "killed"
        shutil.copytree(tmp_path / "old", output)
        run_until(monkeypatch, last, output, 1, restart=True)
        if output.exists():
            held = contents(output)
            assert held == old or wanted.items() <= held.items()
        run_until(monkeypatch, None, output, 1, restart=True)
        assert contents(output) == wanted, last
        shutil.rmtree(output)


def test_two_kills_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, bytes]) -> None:
    for first, second in ((5, 3), (25, 4), (25, 30), (60, 2), (90, 20)):
        output = tmp_path / f"{first} {second}"
        run_until(monkeypatch, first, output)
        run_until(monkeypatch, second, output)
        run_until(monkeypatch, None, output)
        assert contents(output) == wanted


SCRIPT = """
import os, random, signal, sys, time
import torch
from pathlib import Path
from tests.checkpoint.sample import run

torch.set_num_threads(1)
output, count, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
started = time.monotonic()
run(output.with_name("whole"), count)
whole = time.monotonic() - started
moments = random.Random(seed)
done = 0
while True:
    child = os.fork()
    if child == 0:
        run(output, count)
        os._exit(0)
    if done < kills:
        time.sleep(moments.uniform(0, whole / kills * 1.5))
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        break
    assert status == -signal.SIGKILL, status
    done += 1
print(done)
"""


def test_sigkill_at_random_moments(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "out"), "40", "6", "0"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert int(finished.stdout) >= 3
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert len(contents(tmp_path / "out")) > 20


@pytest.fixture
def half_done(tmp_path: Path) -> Iterator[Path]:
    """An output whose first three sections are written."""
    writer = open_writer(tmp_path / "out", COUNT)
    for number in range(3):
        writer.write(
            f"block {number}",
            section_tensors(number),
            {"number": number, "error_db": 0.1 * number, "shape": (1, number)},
        )
    del writer
    yield tmp_path / "out"


def journal_of(output: Path) -> Path:
    return output.with_name("out.partial") / "journal.jsonl"


@pytest.mark.parametrize("tail", [b'{"section": "block 3", "tens', b"\x00" * 50, b"\x00\n", b"{}", b"\n", b"\xff\n"])
def test_a_torn_last_journal_line_is_dropped(half_done: Path, tail: bytes, wanted: dict[str, bytes]) -> None:
    with open(journal_of(half_done), "ab") as stream:
        stream.write(tail)
    assert open_writer(half_done, COUNT).done == ["block 0", "block 1", "block 2"]
    assert contents(run(half_done, COUNT)) == wanted


def test_a_journal_cut_at_any_byte(half_done: Path, wanted: dict[str, bytes]) -> None:
    journal = journal_of(half_done).read_bytes()
    kept = []
    for length in range(len(journal), -1, -97):
        journal_of(half_done).write_bytes(journal[:length])
        kept.append(len(open_writer(half_done, COUNT).done))
    assert kept[0] == 3 and kept[-1] == 0 and kept == sorted(kept, reverse=True)
    assert contents(run(half_done, COUNT)) == wanted


def test_damaged_data_are_written_again(
    half_done: Path, wanted: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    second = open_writer(half_done, COUNT).tensors["model.layers.1.weight_packed"]
    with open(second.file, "r+b") as stream:
        stream.seek(second.offset)
        stream.write(b"\x00")
    assert open_writer(half_done, COUNT).done == ["block 0"]
    assert "section 'block 1' is damaged and is written again" in caplog.text
    assert contents(run(half_done, COUNT)) == wanted


def test_a_lost_shard_is_written_again(half_done: Path, wanted: dict[str, bytes]) -> None:
    open_writer(half_done, COUNT).tensors["model.layers.0.weight"].file.unlink()
    assert open_writer(half_done, COUNT).done == []
    assert contents(run(half_done, COUNT)) == wanted


def test_unfinished_work_of_another_recipe_or_plan_is_refused(half_done: Path, wanted: dict[str, bytes]) -> None:
    before = contents(half_done.with_name("out.partial"))
    for count, fingerprint in ((COUNT, "other recipe"), (COUNT + 1, "recipe")):
        with pytest.raises(InputError, match="unfinished run of another recipe or model.* --restart to discard it"):
            open_writer(half_done, count, fingerprint)
    assert contents(half_done.with_name("out.partial")) == before
    assert open_writer(half_done, COUNT, restart=True).done == []
    assert contents(run(half_done, COUNT)) == wanted


def test_sections_are_not_written_twice(half_done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, offsets = os.pwrite, []

    def watched(descriptor: int, data: memoryview, offset: int) -> int:
        offsets.append(offset)
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", watched)
    end = max(info.offset for info in open_writer(half_done, COUNT).tensors.values())
    assert offsets == [] and 0 < end < SHARD_BYTES * 4
