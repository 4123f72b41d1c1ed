"""Programs in turn: the protocol between the example and its peers, their order, ratios, and the busy core."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from examples import side_by_side_speed as example
from examples.side_by_side_speed import Peer, busy_rows, command, options, speed_rows, spinning, tables

FAKE = str(Path(__file__).parent / "fake_peer.py")
FOLDERS = ["--checkpoint", "c", "--model", "m"]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "SETTLE", 0.0)


def arguments(*more: str) -> Namespace:
    return options().parse_args([*FOLDERS, *more])


def fakes(log: Path, *names: str, last: int = 99) -> Any:
    """Stands in for `command`: starts fake peers under the given names only."""

    def started(name: str, arguments: Namespace) -> list[str]:
        assert name in names
        return [sys.executable, FAKE, name, str(log), str(last)]

    return started


def test_programs_alternate_within_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(example, "command", fakes(log, "a", "b"))
    sizes = ["--batch", "1,3", "--prompt", "5", "--new", "2", "--repeat", "2"]
    example.main([*FOLDERS, "--programs", "a,b", *sizes, "--json", str(tmp_path / "out.json")])
    noted = log.read_text().splitlines()
    one = [f"{name} {what}" for name in "ab" for what in ("prepare 1 7", "prefill 5", "step", "step")]
    assert noted == one * 3 + [line.replace("prepare 1", "prepare 3") for line in one * 3]
    told = json.loads((tmp_path / "out.json").read_text())
    assert [(row["batch"], row["phase"], row["program"], row["runs"]) for row in told["speed"]] == [
        (batch, phase, name, 2) for batch in (1, 3) for phase in ("prefill", "decode") for name in "ab"
    ]
    assert told["programs"]["b"]["threads"] == 1 and told["programs"]["b"]["peak_bytes"] > 1e6
    assert told["busy"] == []
    printed = capsys.readouterr().out
    assert "a: program a, version 1, weights none, threads 1" in printed and "a is" in printed


def test_with_a_busy_core_each_program_decodes_alone_and_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import contextmanager

    log = tmp_path / "log"

    @contextmanager
    def noted(core: int) -> Any:
        with log.open("a") as file:
            file.write(f"busy {core}\n")
        yield
        with log.open("a") as file:
            file.write("quiet\n")

    monkeypatch.setattr(example, "command", fakes(log, "a"))
    monkeypatch.setattr(example, "spinning", noted)
    sizes = ["--prompt", "5", "--new", "1", "--repeat", "1", "--busy-core", "0", "--busy-new", "2"]
    example.main([*FOLDERS, "--programs", "a", *sizes])
    assert log.read_text().splitlines()[-8:] == [
        *("a prepare 1 9", "a prefill 5", "a step", "a step"),
        *("busy 0", "a step", "a step", "quiet"),
    ]


def test_a_program_that_dies_is_named_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "command", fakes(tmp_path / "log", "a", last=1))
    with pytest.raises(SystemExit, match="a: ended with 1: .*out of luck"):
        example.main([*FOLDERS, "--programs", "a", "--prompt", "1", "--new", "1"])


def test_a_program_is_gone_once_it_is_closed(tmp_path: Path) -> None:
    peer = Peer("a", [sys.executable, FAKE, "a", str(tmp_path / "log"), "9"])
    assert peer.prefill(1, 2, 3) >= 0 and peer.decode(2) >= 0
    peer.close()
    assert peer.process.returncode is not None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores can be chosen on Linux only")
def test_the_busy_process_sits_on_its_core_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    core = min(os.sched_getaffinity(0))
    started: list[Any] = []
    popen = example.subprocess.Popen
    monkeypatch.setattr(
        example.subprocess, "Popen", lambda *given, **more: started.append(popen(*given, **more)) or started[-1]
    )
    with spinning(core):
        assert os.sched_getaffinity(started[0].pid) == {core}
        assert started[0].poll() is None
    assert started[0].returncode is not None


def test_ratios_are_of_medians_to_the_first_program() -> None:
    found = {
        "a": [(1.0, 2.0), (2.0, 2.0), (9.0, 8.0)],
        "b": [(3.0, 1.0), (4.0, 1.0), (5.0, 1.0)],
    }
    rows = speed_rows(found, 2, arguments("--prompt", "10", "--new", "4"))
    named = {(row["phase"], row["program"]): row for row in rows}
    assert named["prefill", "a"]["tokens_per_s"] == 2 * 10 / 2 and named["prefill", "a"]["ratio"] == 1.0
    assert named["prefill", "b"]["tokens_per_s"] == 2 * 10 / 4 and named["prefill", "b"]["ratio"] == 2.0
    assert named["decode", "b"]["ratio"] == 0.5
    assert named["prefill", "a"]["tokens_per_s_iqr"] == [20 / 5.5, 20 / 1.5]
    lines = list(tables(rows, [], {"a": 2_000_000_000}))
    assert lines[0].endswith("a is") and "2.00 x" in lines[2] and lines[-1].endswith("2.00 GB")


def test_the_share_kept_beside_a_busy_core_is_of_medians() -> None:
    (row,) = busy_rows({"a": [(1.0, 4.0), (1.0, 2.0), (1.0, 2.5)]})
    assert row["kept"] == 1.0 / 2.5
    assert list(tables([], [row], {})) == [
        "beside a busy core a                      keeps  40.0% of its idle decoding speed"
    ]


def test_llama_cpp_is_left_out_where_it_cannot_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("llama.cpp", arguments()) is None
    assert "left out, since --peer-gguf names no file" in capsys.readouterr().err
    assert command("llama.cpp", arguments("--peer-gguf", "x.gguf", "--peer-python", "/bin/false")) is None
    assert "/bin/false cannot import llama_cpp" in capsys.readouterr().err


def test_each_program_gets_its_model_and_threads() -> None:
    ours = command("lmpress", arguments("--threads", "3"))
    assert ours is not None and ours[-4:] == ["--model", "c", "--threads", "3"]
    theirs = command("transformers-bfloat16", arguments("--threads", "3"))
    assert theirs is not None and theirs[-6:] == ["--model", "m", "--dtype", "bfloat16", "--threads", "3"]
    with pytest.raises(SystemExit, match="'vllm' is not known"):
        command("vllm", arguments())


def test_real_peers_answer(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = ["--checkpoint", str(tiny_llama), "--model", str(tiny_llama)]
    sizes = ["--batch", "2", "--prompt", "4", "--new", "2", "--repeat", "1", "--threads", "1"]
    example.main([*folders, *sizes, "--programs", "lmpress,transformers-float32"])
    printed = capsys.readouterr().out
    assert "lmpress: program lmpress" in printed and "threads 1" in printed
    assert "transformers-float32: program transformers" in printed and printed.count("decode ") == 2
