"""The training loop: steps of AdamW on a student's parameters, held-out divergence, states that a kill leaves whole.

Which sequences a step sees is a function of its number, so that a resumed run, and several processes that share the
steps (`accelerate launch`), draw the very loss curve of one process that was never interrupted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from compress import methods
from compress.calibrate import arithmetic
from compress.distill import DISTRIBUTION, HIDDEN_STATES, Target, forward_kl
from compress.distill.chunks import chunked_mean
from compress.distill.mixture import Term as Loss
from compress.distill.mixture import token_loss
from compress.distill.schedule import learning_rate
from compress.errors import InputError
from compress.run_log import Observer
from compress.stage import Term
from compress.training.data import Sequences, rows_of
from compress.training.network import Network
from compress.training.save import load_state, save_state
from compress.training.student import Student
from compress.training.teacher import Signal
from compress.training_settings import Training


@dataclass(frozen=True)
class Lesson:
    """What a student learns: sequences, of which the last `held_out` are never trained on, teacher and losses.

    vocabulary: tokens that student and teacher both know, the first ones; rows beyond them are padding.
    """

    sequences: Sequences
    held_out: int
    signal: Signal
    terms: tuple[Term, ...]
    vocabulary: int

    @property
    def count(self) -> int:
        """Sequences that are trained on."""
        return len(self.sequences.ids) - self.held_out


@dataclass
class History:
    """How a training went.

    losses: of each step, the mean over its batch. held_out: (step, mean KL divergence from the teacher in nats per
    token). seconds and tokens: of training steps alone. stopped: why it ended before its last step.
    """

    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    stopped: str | None = None

    @property
    def best(self) -> tuple[int, float]:
        """Step and divergence of the best held-out measurement, the earliest of equals."""
        return min(self.held_out, key=lambda row: (row[1], row[0]))


class Objective(nn.Module):
    """A student and its lesson as one module whose output is the loss: what accelerate wraps."""

    def __init__(self, network: Network, lesson: Lesson) -> None:
        super().__init__()
        self.network = network
        self.lesson = lesson
        found = [(methods.find("distill", term.method), term) for term in lesson.terms]
        self.over_states: list[tuple[ModuleType, Term]] = [one for one in found if HIDDEN_STATES in one[0].NEEDS]
        over_tokens = [one for one in found if HIDDEN_STATES not in one[0].NEEDS]
        self.taught = any(DISTRIBUTION in module.NEEDS for module, _ in over_tokens)
        losses = [Loss(module, term.settings, term.weight) for module, term in over_tokens]
        self.score = token_loss(losses) if losses else None

    def forward(self, rows: Tensor) -> Tensor:
        """The mean loss over the sequences `rows` [B], in bfloat16 where the device multiplies that faster."""
        with self._autocast():
            return self._loss(rows)

    def _loss(self, rows: Tensor) -> Tensor:
        every = bool(self.over_states)
        ids = self.lesson.sequences.ids[rows].to(self.device)
        weights = self.lesson.sequences.weights[rows].to(self.device)
        hidden, states = self.network.hidden(ids, every)
        teaching = self.lesson.signal.teach(rows, ids, every) if every or self.taught else None
        labels = ids.roll(-1, 1).flatten()

        def score(logits: Tensor, index: Tensor) -> Tensor:
            told = teaching.distribution(index) if teaching is not None and self.taught else None
            assert self.score is not None
            return self.score(logits, Target(labels[index], told))

        total = self._chunked(hidden, score, weights) if self.score is not None else hidden.new_zeros(())
        for module, term in self.over_states:
            assert teaching is not None
            total = total + term.weight * module.loss(states, teaching.hidden_states, weights > 0, term.settings)
        return total

    @torch.no_grad()
    def divergence(self, rows: Tensor) -> Tensor:
        """The sum over positions of `rows` that count of the KL divergence from the teacher, and their number: [2]."""
        ids = self.lesson.sequences.ids[rows].to(self.device)
        counted = (self.lesson.sequences.weights[rows] > 0).to(self.device, torch.float32)
        teaching = self.lesson.signal.teach(rows, ids, False)
        labels = ids.roll(-1, 1).flatten()

        def score(logits: Tensor, index: Tensor) -> Tensor:
            return forward_kl.loss(logits, Target(labels[index], teaching.distribution(index)), forward_kl.Config())

        with self._autocast():
            mean = self._chunked(self.network.hidden(ids)[0], score, counted)
        return torch.stack([mean * counted.sum(), counted.sum()])

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def _autocast(self) -> torch.autocast:
        fast = arithmetic(self.device) == torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=fast)

    def _chunked(self, hidden: Tensor, score: Callable[[Tensor, Tensor], Tensor], weights: Tensor) -> Tensor:
        def head(hidden: Tensor) -> Tensor:
            return self.network.logits(hidden)[:, : self.lesson.vocabulary]

        return chunked_mean(hidden.flatten(0, 1), head, self.network.head_parameters(), score, weights.flatten())


@dataclass(frozen=True)
class Place:
    """Where states are kept and what they belong to; `key` identifies a run, and another's states are refused."""

    folder: Path
    key: str

    @property
    def last(self) -> Path:
        return self.folder / "last"

    @property
    def best(self) -> Path:
        return self.folder / "best"


def train(student: Student, lesson: Lesson, settings: Training, place: Place, observer: Observer) -> History:
    """Train `student` in place and leave it as it was at its best held-out divergence, the start included.

    A state is kept every `settings.every` steps; a run that finds one goes on from it. Raises InputError where the loss
    is no longer finite: the states of the last measurement stay.
    """
    run = _Run(student, lesson, settings, place)
    history, step = run.resume()
    while step < settings.steps and history.stopped is None:
        if step % settings.every == 0 and not _measured(history, step):
            run.measure(history, step)
            observer.event("held_out", step=step, kl=history.held_out[-1][1])
            continue
        began = time.monotonic()
        history.losses.append(run.step(step))
        history.seconds += time.monotonic() - began
        history.tokens += run.sequences_per_step * lesson.sequences.ids.shape[1]
        step += 1
        observer.event(
            "training",
            step=step,
            steps=settings.steps,
            loss=history.losses[-1],
            kl=history.held_out[-1][1],
            tokens_per_second=history.tokens / history.seconds,
        )
    if not _measured(history, step):
        run.measure(history, step)
        observer.event("held_out", step=step, kl=history.held_out[-1][1])
    load_state(place.best, student, None, place.key)
    return history


def _measured(history: History, step: int) -> bool:
    return bool(history.held_out) and history.held_out[-1][0] == step


class _Run:
    """A student on its way: optimizer, processes, states."""

    def __init__(self, student: Student, lesson: Lesson, settings: Training, place: Place) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs

        on_cpu = next(student.network.parameters()).device.type == "cpu"
        # Autocasting is the objective's own: accelerate fixes one for a whole process. Buffers (masks) never change.
        alike = DistributedDataParallelKwargs(broadcast_buffers=False)
        self.accelerator = Accelerator(mixed_precision="no", cpu=on_cpu, kwargs_handlers=[alike])
        self.student = student
        self.lesson = lesson
        self.settings = settings
        self.place = place
        self.objective = Objective(student.network, lesson)
        self.parameters = [one for one in student.network.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(_groups(student, settings), lr=settings.learning_rate, betas=(0.9, 0.95))
        self.wrapped, self.stepper = self.accelerator.prepare(self.objective, self.optimizer)

    @property
    def batches_per_step(self) -> int:
        """Batches of all processes together."""
        return self.settings.accumulation * self.accelerator.num_processes

    @property
    def sequences_per_step(self) -> int:
        return self.settings.batch * self.batches_per_step

    def resume(self) -> tuple[History, int]:
        """What an earlier run has come to: its history and the steps it has made."""
        found = load_state(self.place.last, self.student, self.optimizer, self.place.key)
        if found is None:
            return History(), 0
        history = History(**found)
        history.held_out = [(step, kl) for step, kl in history.held_out]
        return history, len(history.losses)

    def step(self, step: int) -> float:
        """One step of the optimizer; the mean loss over its batches, all processes together.

        Raises InputError where it is not finite, before any weight has moved.
        """
        settings, accelerator = self.settings, self.accelerator
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(
                step, settings.steps, settings.learning_rate, settings.warmup, settings.schedule
            )
        total = torch.zeros((), device=accelerator.device)
        for number in range(settings.accumulation):
            last = number + 1 == settings.accumulation
            rows = self.rows(step, number)
            with nullcontext() if last else accelerator.no_sync(self.wrapped):
                loss = self.wrapped(rows)
                accelerator.backward(loss / settings.accumulation)
            total += loss.detach().float() / settings.accumulation
        mean = float(accelerator.reduce(total, "mean"))
        norm = float(accelerator.clip_grad_norm_(self.parameters, settings.clip))
        if not (math.isfinite(mean) and math.isfinite(norm)):
            raise InputError(
                f"distill: step {step + 1} has a loss of {mean} and gradients of norm {norm} (sequences "
                f"{', '.join(str(int(row)) for row in self.rows(step, settings.accumulation - 1))}): nothing behind it "
                f"would mean anything; the state of step {self.settings.every * (step // self.settings.every)} is kept "
                "beside the output: lower training.learning_rate"
            )
        self.stepper.step()
        self.stepper.zero_grad()
        return mean

    def rows(self, step: int, number: int) -> Tensor:
        """The sequences of this process's batch `number` of a step."""
        batch = step * self.batches_per_step + number * self.accelerator.num_processes + self.accelerator.process_index
        sequences, settings = self.lesson.sequences, self.settings
        return rows_of(batch, settings.batch, self.lesson.count, settings.seed, sequences.group)

    def measure(self, history: History, step: int) -> None:
        """Note the held-out divergence, keep the state, and the student too where it is the best so far."""
        held = torch.arange(self.lesson.count, len(self.lesson.sequences.ids))
        sums = sum(self.objective.divergence(rows) for rows in held.split(self.settings.batch))
        assert isinstance(sums, Tensor)
        divergence = float(sums[0] / sums[1])
        if not math.isfinite(divergence):
            raise InputError(
                f"distill: the held-out divergence behind step {step} is {divergence}: lower training.learning_rate"
            )
        history.held_out.append((step, divergence))
        since = sum(1 for at, _ in history.held_out if at > history.best[0])
        if 0 < self.settings.patience <= since:
            history.stopped = f"no gain in held-out divergence over {since} measurements"
        if self.accelerator.is_main_process:
            if history.best[0] == step:
                save_state(self.place.best, self.student, None, asdict(history), self.place.key)
            save_state(self.place.last, self.student, self.optimizer, asdict(history), self.place.key)
        self.accelerator.wait_for_everyone()


def _groups(student: Student, settings: Training) -> list[dict[str, Any]]:
    """Parameter groups of AdamW: matrices of weights decay; vectors and scales, which are no weights, do not."""
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, one in student.parameters_by_name().items():
        (decaying if one.ndim > 1 and not name.endswith(".scale") else others).append(one)
    groups = [
        {"params": decaying, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
