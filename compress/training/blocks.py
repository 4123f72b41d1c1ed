"""Layer-wise recovery: each block is trained to answer as the teacher's does, with one block of either in memory.

Two streams of hidden states walk through the models: the teacher's, whose outputs are the targets, and the student's,
made by its blocks as they are stored, so that each block learns to make up for what those before it have lost. What is
propagated is decoded from what was written: a resumed run computes the same as an uninterrupted one.

Peak memory of a block with P weights, beside the hidden states: 26 P bytes (weights, two moments of AdamW, gradients,
the weights on their grid and the gradients of those: float32; what is multiplied: 16 bit), less what autograd frees on
its way, and the activations of one batch within the block. The teacher's block, 4 P, is gone before. Hidden states take
at most ACTIVATION_BUDGET, all streams together; the rest of them lies on the disk.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.activations import ActivationBuffer
from compress.calibrate import Calibration, arithmetic, block_weights, embed_from, propagate
from compress.checkpoint import Checkpoint, Section, Writer, open_checkpoint
from compress.checkpoint.quantization_config import stored_schemes
from compress.checkpoint.source import Source, dequantized
from compress.distill import block_output
from compress.distill.block_output import Config
from compress.distill.schedule import learning_rate
from compress.errors import USAGE, InputError
from compress.model import Skeleton, build_skeleton, materialized
from compress.plan import ACTIVATION_BUDGET
from compress.run_log import Observer
from compress.training.block_student import BlockStudent, Layout, load_block
from compress.training.grid_layers import pruned_layers
from compress.training.save import sections_of

# A block has few steps: the second moment forgets within twenty of them, and a tenth of them warm up.
BETAS = (0.9, 0.95)
WARMUP = 0.1
# What float32 can tell of an error, in dB.
NO_ERROR = 200.0


@dataclass(frozen=True)
class Pair:
    """A student and its teacher, opened: no weight of either is in memory."""

    student: Checkpoint
    layout: Layout
    teacher: Source
    teacher_skeleton: Skeleton

    @property
    def blocks(self) -> list[str]:
        """Names of the student's blocks."""
        return self.layout.skeleton.blocks

    @property
    def sections(self) -> dict[str, Section]:
        """What a writer is to plan: the student's tensors, outside the blocks each alone, then block by block."""
        return sections_of(self.student, self.blocks)


@dataclass(frozen=True)
class BlockRow:
    """What became of one block.

    error_db_before, error_db_after: signal over error of its output on the held-out sequences, in dB. steps: that were
    made; kept: after how many of them it was stored, 0 for a block that stayed as it was. seconds: None where an
    earlier run did it.
    """

    index: int
    name: str
    error_db_before: float
    error_db_after: float
    steps: int
    kept: int
    seconds: float | None = field(default=None, compare=False)

    def durable(self) -> dict[str, Any]:
        """As plain values without the timing: the same in every run."""
        values = asdict(self)
        del values["seconds"]
        return values


def open_pair(student: Path, teacher: Path) -> Pair:
    """Open the folders of a student and its teacher. A compressed teacher is read as the floats it stands for.

    Raises InputError for a folder that is damaged, and for models whose blocks are not one to one.
    """
    opened, taught = open_checkpoint(student), open_checkpoint(teacher)
    source: Source = taught
    if taught.quantization is not None:
        source = dequantized(taught, stored_schemes(taught), torch.float32)
    layout = Layout(build_skeleton(student), stored_schemes(opened), pruned_layers(student))
    pair = Pair(opened, layout, source, build_skeleton(teacher))
    sizes = [(len(one.blocks), one.dimensions.hidden_size) for one in (layout.skeleton, pair.teacher_skeleton)]
    if sizes[0] != sizes[1]:
        ours, theirs = (f"{depth} blocks of width {width}" for depth, width in sizes)
        raise InputError(
            f"block_output: the student has {ours} and the teacher {theirs}, where blocks are compared one to one: use "
            "a loss over next-token distributions, such as forward_kl",
            USAGE,
        )
    return pair


def recover_blocks(
    pair: Pair, ids: Tensor, settings: Config, writer: Writer, device: torch.device, observer: Observer
) -> list[BlockRow]:
    """Train the student block by block on sequences `ids` int64 [S, T], and give all of its tensors to `writer`.

    writer: of `pair.sections`, under a fingerprint that covers the pair, `ids` and `settings`; blocks that it holds
    already are not trained again. A block is stored as it was at its lowest held-out error, the start included: masks,
    zero points and outlier columns are kept, everything else may move. The observer is told of each block
    ("recovered": the fields of its row).
    Returns a row per block. Raises InputError for too few sequences, a token that the embedding has no row for, a loss
    that is no longer finite (finished blocks stay in the writer), and a disk that is full.
    """
    _check(pair, ids, settings)
    done = frozenset(writer.done)
    for name, section in pair.sections.items():
        if name not in {*done, *pair.blocks}:
            writer.write(name, {tensor: pair.student.read(tensor) for tensor in section.tensors}, {})
    rows: list[BlockRow] = []
    if done.issuperset(pair.blocks):
        return [BlockRow(**writer.record(name)) for name in pair.blocks]
    recovery = _Recovery(pair, settings, writer, device)
    with recovery.streams(ids) as streams:
        for index, name in enumerate(pair.blocks):
            began = time.monotonic()
            recovery.step(index, streams, trained=name not in done)
            row = BlockRow(**writer.record(name))
            rows.append(row if name in done else replace(row, seconds=time.monotonic() - began))
            observer.event("recovered", **asdict(rows[-1]))
    return rows


def _check(pair: Pair, ids: Tensor, settings: Config) -> None:
    """Raise InputError unless there is a batch to train on beside the held-out ones, and a row for each token."""
    if _held_out(ids, settings) >= _batches(ids, settings):
        raise InputError(
            f"block_output: {len(ids)} sequences in batches of {settings.batch} leave none to train on beside what is "
            "held out: give more sequences, or a smaller batch or held_out",
            USAGE,
        )
    for skeleton in (pair.layout.skeleton, pair.teacher_skeleton):
        name, embedding = skeleton.embedding()
        if int(ids.max()) >= embedding.num_embeddings:
            raise InputError(
                f"block_output: token {int(ids.max())} is beyond the {embedding.num_embeddings} rows of {name}.weight: "
                "use the tokenizer that student and teacher share"
            )


def _batches(ids: Tensor, settings: Config) -> int:
    return -(-len(ids) // settings.batch)


def _held_out(ids: Tensor, settings: Config) -> int:
    """How many batches, the last ones, are held out."""
    return max(1, round(settings.held_out * _batches(ids, settings)))


@dataclass(frozen=True)
class _Streams:
    """Hidden states in batches, the last `held_out` of which are not trained on: the student's in front of the current
    block; the teacher's there, and behind it once the block has been taught."""

    student: Calibration
    teacher: Calibration
    held_out: int

    @property
    def trained(self) -> int:
        return len(self.student.hidden) - self.held_out


class _Recovery:
    """A pair on its way through its blocks."""

    def __init__(self, pair: Pair, settings: Config, writer: Writer, device: torch.device) -> None:
        self.pair = pair
        self.settings = settings
        self.writer = writer
        self.device = device
        self.budget = ACTIVATION_BUDGET // (2 if settings.inputs == "compressed" else 3)

    @contextmanager
    def streams(self, ids: Tensor) -> Iterator[_Streams]:
        """Both streams in front of the first block; what they hold is dropped at the end."""
        with ExitStack() as buffers:
            student, teacher = (self._buffer(name, buffers) for name in ("student", "teacher"))
            pair, batch, dtype = self.pair, self.settings.batch, arithmetic(self.device)
            yield _Streams(
                embed_from(pair.student, pair.layout.skeleton, ids, batch, student, dtype),
                embed_from(pair.teacher, pair.teacher_skeleton, ids, batch, teacher, dtype),
                _held_out(ids, self.settings),
            )

    def step(self, index: int, streams: _Streams, trained: bool) -> None:
        """Take both streams through block `index`, which is trained and written before, if it is to be `trained`."""
        with ExitStack() as buffers:
            inputs = None
            if trained and self.settings.inputs != "compressed":
                inputs = self._buffer("inputs", buffers)
                for batch in range(len(streams.teacher.hidden)):
                    inputs.append(streams.teacher.hidden[batch])
            self._teach(index, streams.teacher)
            if trained:
                self._recover(index, streams, inputs)
        if index + 1 < len(self.pair.blocks):
            self._propagate(index, streams.student)

    def _buffer(self, name: str, buffers: ExitStack) -> ActivationBuffer:
        buffer = ActivationBuffer(self.budget, self.writer.work / name)
        buffers.callback(buffer.close)
        return buffer

    def _teach(self, index: int, teacher: Calibration) -> None:
        """Replace the teacher's hidden states by those behind its block."""
        skeleton = self.pair.teacher_skeleton
        with materialized(skeleton.block(index), block_weights(self.pair.teacher, skeleton, index, self.device)):
            propagate(skeleton, index, teacher, {})

    def _propagate(self, index: int, student: Calibration) -> None:
        """Replace the student's hidden states by those behind its block as it was written."""
        layout = self.pair.layout
        block = load_block(layout, index, self.writer.read(self.pair.blocks[index]), self.device)
        weights, rules = block.weights(), block.rules
        del block
        with materialized(layout.skeleton.block(index), weights):
            propagate(layout.skeleton, index, student, rules)

    def _recover(self, index: int, streams: _Streams, inputs: ActivationBuffer | None) -> None:
        """Train a block and write it as it was at its lowest held-out error."""
        name, settings = self.pair.blocks[index], self.settings
        stored = {tensor: self.pair.student.read(tensor) for tensor in self.pair.sections[name].tensors}
        block = load_block(self.pair.layout, index, stored, self.device)
        optimizer = _optimizer(block, settings)
        generator = torch.Generator().manual_seed(settings.seed * len(self.pair.blocks) + index)
        before = best = self._held_out_error(index, block, streams)
        steps, step, kept = settings.epochs * streams.trained, 0, 0
        for _ in range(settings.epochs):
            for batch in torch.randperm(streams.trained, generator=generator).tolist():
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, steps, group["peak"], WARMUP, "cosine")
                source = streams.student
                if inputs is not None and (settings.inputs == "float" or torch.rand((), generator=generator) < 0.5):
                    source = replace(streams.student, hidden=inputs)
                loss = self._losses(index, block, source, streams.teacher, batch).mean()
                if not math.isfinite(loss.item()):
                    raise InputError(
                        f"block_output: {name}: step {step + 1} of {steps}, on batch {batch}, has a loss of "
                        f"{loss.item()} (the {index} blocks before it are finished): lower learning_rate"
                    )
                optimizer.zero_grad()
                loss.backward()
                if step == 0:
                    _drop_noise(block)
                optimizer.step()
                step += 1
            error = self._held_out_error(index, block, streams)
            if error < best:
                best, kept, stored = error, step, block.stored()
        row = BlockRow(index, name, _decibels(before), _decibels(best), steps, kept)
        self.writer.write(name, stored, row.durable())

    def _losses(self, index: int, block: BlockStudent, source: Calibration, teacher: Calibration, batch: int) -> Tensor:
        """The loss of each position of a batch."""
        output = source.run(block.module, index, batch, self.device)
        return block_output.loss(output, teacher.hidden[batch].to(self.device))

    @torch.no_grad()
    def _held_out_error(self, index: int, block: BlockStudent, streams: _Streams) -> float:
        """Error over signal of the block's output, as it would be stored now, on the held-out batches."""
        held = range(streams.trained, len(streams.student.hidden))
        found = [self._losses(index, block, streams.student, streams.teacher, batch) for batch in held]
        return float(torch.cat(found).mean())


def _optimizer(block: BlockStudent, settings: Config) -> torch.optim.AdamW:
    scales = [layer.scale for layer in block.layers.values() if layer.scale is not None]
    known = {id(scale) for scale in scales}
    others = [parameter for parameter in block.module.parameters() if id(parameter) not in known]
    rate = settings.learning_rate
    groups = [{"params": others, "peak": rate}, {"params": scales, "peak": rate * settings.scale_rate}]
    return torch.optim.AdamW(groups, betas=BETAS, weight_decay=0.0, fused=True)


def _drop_noise(block: BlockStudent) -> None:
    """Forget the first gradients of scales: every weight still stands on its grid point, so that they are sums of float
    rounding, which Adam would blow up to whole steps."""
    for layer in block.layers.values():
        if layer.scale is not None:
            layer.scale.grad = None


def _decibels(error: float) -> float:
    """Signal over error in dB of an error over signal."""
    return min(NO_ERROR, -10 * math.log10(error)) if error > 0 else NO_ERROR
