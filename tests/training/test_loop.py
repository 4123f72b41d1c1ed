"""The training loop: against a plain loop over full logits, after a kill, over processes, and when it goes wrong."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.distill.forward_kl import Config
from compress.errors import InputError
from compress.stage import Term
from compress.training.loop import History, Lesson, Place, train
from compress.training.network import Network, load_network
from compress.training.sequences import Sequences, bundle, rows_of
from compress.training.student import Student, load_student
from compress.training.teacher import OnlineTeacher, Signal, Teaching
from compress.training_settings import Training
from tests.tiny import VOCABULARY, write_model

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
TERMS = (Term("forward_kl", Config()),)
SETTINGS = Training(steps=6, batch=2, learning_rate=1e-3, every=2, warmup=0.0)


class Silent:
    """Watches a run and does nothing; ends it, as a kill would, at the event it is told to."""

    def __init__(self, last_step: int | None = None) -> None:
        self.last_step = last_step

    def event(self, kind: str, /, **fields: Any) -> None:
        if kind == "training" and fields["step"] == self.last_step:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student and a teacher, tiny and random, that differ."""
    place = tmp_path_factory.mktemp("loop")
    return write_model(place / "student", seed=1), write_model(place / "teacher", seed=2)


def sequences(count: int = 10, length: int = 16) -> Sequences:
    ids = torch.randint(0, 256, (count, length), generator=torch.Generator().manual_seed(0))
    weights = torch.ones(count, length)
    weights[:, -1] = 0
    weights[::3, :5] = 0
    return bundle(ids, weights, {"notes": []})


def lesson(teacher: Path) -> Lesson:
    return Lesson(sequences(), 2, OnlineTeacher(load_network(teacher, CPU), VOCABULARY), TERMS, VOCABULARY)


def trained(
    folders: tuple[Path, Path], place: Path, settings: Training = SETTINGS, **watch: Any
) -> tuple[Student, History]:
    student = load_student(folders[0], settings, CPU)
    return student, train(student, lesson(folders[1]), settings, Place(place, "run"), Silent(**watch))


def plain_loss(network: Network, teacher: Network, rows: Tensor) -> Tensor:
    """Forward KL over full logits, the obvious way."""
    data = sequences()
    ids, weights = data.ids[rows], data.weights[rows]
    ours = network.logits(network.hidden(ids)[0].flatten(0, 1)).float().log_softmax(-1)
    with torch.no_grad():
        theirs = teacher.logits(teacher.hidden(ids)[0].flatten(0, 1)).float().log_softmax(-1)
    each = (theirs.exp() * (theirs - ours)).sum(-1)
    return (each * weights.flatten()).sum() / weights.sum()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_loss_curve_is_that_of_a_plain_loop(
    folders: tuple[Path, Path], tmp_path: Path, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.training.loop.arithmetic", lambda device: torch.float32)
    monkeypatch.setattr("compress.training.teacher.arithmetic", lambda device: torch.float32)
    settings = SETTINGS.model_copy(update={"accumulation": accumulation})
    _, history = trained(folders, tmp_path, settings)
    student, teacher = load_student(folders[0], settings, CPU), load_network(folders[1], CPU)
    parameters = list(student.parameters_by_name().values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    expected = []
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / 6))
        batches = [rows_of(step * accumulation + number, 2, 8, 0) for number in range(accumulation)]
        losses = [plain_loss(student.network, teacher, rows) / accumulation for rows in batches]
        for loss in losses:
            loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(sum(loss.item() for loss in losses))
    assert history.losses == pytest.approx(expected, rel=1e-4)
    assert history.losses[-1] < 0.95 * history.losses[0]
    assert [step for step, _ in history.held_out] == [0, 2, 4, 6]
    assert history.tokens == 6 * 2 * accumulation * 16


def test_a_killed_training_goes_on_to_the_same_curve_and_weights(folders: tuple[Path, Path], tmp_path: Path) -> None:
    whole, history = trained(folders, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        trained(folders, tmp_path / "killed", last_step=5)
    student, resumed = trained(folders, tmp_path / "killed")
    assert resumed.losses == history.losses
    assert resumed.held_out == history.held_out
    for name, tensor in whole.stored().items():
        assert torch.equal(tensor, student.stored()[name]), name


def test_a_finished_training_is_not_repeated(folders: tuple[Path, Path], tmp_path: Path) -> None:
    trained(folders, tmp_path)
    student, history = trained(folders, tmp_path, last_step=1)
    assert len(history.losses) == 6


def test_the_best_state_is_kept_and_the_start_is_one(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """A student that is its own teacher can only get worse: it is left as it was, and the training ends early."""
    worse = SETTINGS.model_copy(update={"learning_rate": 0.05, "every": 1, "patience": 2})
    student, history = trained((folders[0], folders[0]), tmp_path, worse)
    assert history.best[0] == 0 and len(history.losses) == 2
    assert history.stopped == "no gain in held-out divergence over 2 measurements"
    untouched = load_student(folders[0], worse, CPU)
    assert all(torch.equal(tensor, student.stored()[name]) for name, tensor in untouched.stored().items())


class Broken:
    """A teacher that says NaN from its fifth batch on: that of the third step, behind two measurements."""

    def __init__(self, signal: Signal) -> None:
        self.signal = signal
        self.asked = 0

    def teach(self, rows: Tensor, ids: Tensor, every: bool) -> Teaching:
        self.asked += 1
        told = self.signal.teach(rows, ids, every)
        if self.asked < 5:
            return told
        return Teaching(lambda index: told.distribution(index) * math.nan, ())  # type: ignore[operator]


def test_a_loss_that_is_not_finite_ends_it_and_keeps_the_last_state(folders: tuple[Path, Path], tmp_path: Path) -> None:
    student = load_student(folders[0], SETTINGS, CPU)
    sound = lesson(folders[1])
    broken = Lesson(sound.sequences, sound.held_out, Broken(sound.signal), TERMS, VOCABULARY)
    rows = ", ".join(str(int(row)) for row in rows_of(2, 2, 8, 0))
    with pytest.raises(
        InputError, match=rf"step 3 has a loss of nan .*\(sequences {rows}\).*lower training.learning_rate"
    ):
        train(student, broken, SETTINGS, Place(tmp_path, "run"), Silent())
    _, history = trained(folders, tmp_path)
    assert len(history.losses) == 6, "the run goes on from the last state"


def test_another_runs_state_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    trained(folders, tmp_path)
    student = load_student(folders[0], SETTINGS, CPU)
    with pytest.raises(InputError, match="is the state of another run"):
        train(student, lesson(folders[1]), SETTINGS, Place(tmp_path, "other"), Silent())


def test_two_processes_draw_the_curve_of_twice_the_accumulation(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """`accelerate launch --num_processes 2`, over gloo, against one process."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command = [*launch, "-m", "tests.training.two_processes", *map(str, (*folders, tmp_path / "two"))]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    two = json.loads((tmp_path / "two" / "losses.json").read_text())
    _, one = trained(folders, tmp_path / "one", SETTINGS.model_copy(update={"accumulation": 2}))
    assert two == pytest.approx(one.losses, rel=1e-4)
