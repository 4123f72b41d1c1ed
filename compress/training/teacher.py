"""What a teacher says of the positions of a batch: by a network that runs beside the student, or from a cache on disk.

Both cut the distribution to the first `vocabulary` tokens, since embeddings of one tokenizer are padded to different
sizes, and both give it for chosen positions alone, so that the logits of a whole batch never exist at once.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.calibrate import arithmetic
from compress.checkpoint.tokenizer import load_tokenizer
from compress.distill import TopK
from compress.errors import USAGE, InputError
from compress.training.data import Sequences
from compress.training.network import Network
from compress.training.topk_cache import Cache, CacheKey, head_of, write

ROWS = 256  # positions whose logits exist at a time while a cache is written
TOKENS = 64  # of the vocabulary that are compared as one text
# What tokenizers are known to differ in: normalisation, case, digits, spaces, line ends, scripts, joined emoji, code.
PROBES = (
    "The quick brown fox, it's said, doesn't JUMP over 3 lazy dogs...",
    "0 7 10 2024 3.14159 1,000,000 -5e-12 0x1F 007",
    "caf\u00e9 cafe\u0301 \ufb01ne \u210c \uff21\uff22 na\u00efve stra\u00dfe \u0130stanbul",
    "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \uc548\ub155 \u043f\u0440\u0438\u0432\u0435\u0442 "
    "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u2192 \u2211 \u00a0\u200b\ufeff",
    " lead  two   three\ttab\t\ttabs\nline\n\nlines\r\nend ",
    "def f(x: int) -> list[str]:\n    return [f'{x!r}' for _ in range(x)]  # <b>&amp;</b> \\n $x_i^2$ && a != b;",
)


@dataclass(frozen=True)
class Teaching:
    """What a teacher says of a batch [B, T].

    distribution: flat positions int64 [m] of the batch, row by row, -> logits float32 [m, V] or the TopK of those.
    hidden_states: of the embedding and of each block [B, T, D]; empty unless they were asked for.
    """

    distribution: Callable[[Tensor], Tensor | TopK]
    hidden_states: tuple[Tensor, ...]


class Signal(Protocol):
    """Where a training gets its teacher's word from."""

    def teach(self, rows: Tensor, ids: Tensor, every: bool) -> Teaching:
        """On sequences number `rows` [B] of the training's text, which are `ids` [B, T]; every: hidden states too."""
        ...


@dataclass(frozen=True)
class OnlineTeacher:
    """A network that runs beside the student, without gradients. vocabulary: tokens that both know, the first ones."""

    network: Network
    vocabulary: int

    def teach(self, rows: Tensor, ids: Tensor, every: bool) -> Teaching:
        """Runs the network once, and its head for the positions that are asked for."""
        return Teaching(*self.answer(ids, every))

    def answer(self, ids: Tensor, every: bool) -> tuple[Callable[[Tensor], Tensor], tuple[Tensor, ...]]:
        """Logits float32 [m, V] by flat positions of `ids` [B, T], and the hidden states if `every`.

        The blocks multiply in bfloat16 where the device has units for it; the head in the precision of its weights,
        because rounding logits themselves costs more than that.
        """
        kind = ids.device.type
        fast = arithmetic(ids.device) == torch.bfloat16
        with torch.no_grad(), torch.autocast(kind, torch.bfloat16, enabled=fast):
            last, states = self.network.hidden(ids, every)
        hidden = last.flatten(0, 1).to(self.network.head_parameters()[0].dtype)

        def logits(positions: Tensor) -> Tensor:
            with torch.no_grad(), torch.autocast(kind, enabled=False):
                return self.network.logits(hidden[positions])[:, : self.vocabulary].float()

        return logits, states


@dataclass(frozen=True)
class OfflineTeacher:
    """A cache of the training's text. device: where the student wants what is read."""

    cache: Cache
    device: torch.device

    def teach(self, rows: Tensor, ids: Tensor, every: bool) -> Teaching:
        """Reads the positions that are asked for. Raises InputError if `every`: no hidden states are kept."""
        if every:
            raise InputError(
                "teacher.signal: is 'offline', which keeps no hidden states, and a loss compares them: write 'online'",
                USAGE,
            )
        length = ids.shape[1]
        held = rows.cpu()

        def distribution(positions: Tensor) -> TopK:
            flat = positions.cpu()
            head = self.cache.read(held[flat // length], flat % length)
            return TopK(head.log_probs.to(self.device), head.indices.to(self.device))

        return Teaching(distribution, ())


def write_cache(
    folder: Path, key: CacheKey, teacher: OnlineTeacher, sequences: Sequences, progress: Callable[[int, int], None]
) -> None:
    """Write what `teacher` says of every position of `sequences` to the cache `folder`, or what is missing of it.

    progress: told how many sequences are done, of how many. Raises InputError as `topk_cache.write` does, and for a
    teacher that answers NaN.
    """
    device = teacher.network.head_parameters()[0].device

    def head(rows: Tensor, ids: Tensor) -> TopK:
        logits, _ = teacher.answer(ids.to(device), every=False)
        heads = [head_of(logits(some), key.k) for some in torch.arange(ids.numel(), device=device).split(ROWS)]
        log_probs = torch.cat([one.log_probs for one in heads])
        if log_probs.isnan().any():
            raise InputError(
                f"teacher.model: answers NaN within sequences {int(rows[0])} to {int(rows[-1])}: give a working teacher"
            )
        return TopK(log_probs, torch.cat([one.indices for one in heads]))

    write(folder, key, sequences.ids, head, progress)


def refuse_other_tokenizer(student_folder: Path, teacher_folder: Path) -> None:
    """Raise InputError, naming the first difference, unless both folders hold the same tokenizer.

    The same: every token has the same id, and both read some awkward texts and the texts of all tokens, special ones
    included, as the same ids, a start token before them or not. Rows of the embeddings beyond it are no part of it.
    """
    student, teacher = load_tokenizer(student_folder), load_tokenizer(teacher_folder)
    difference = _vocabulary_difference(student, teacher) or _reading_difference(student, teacher)
    if difference:
        raise InputError(
            f"teacher.model: {teacher_folder} has another tokenizer than the student, {student_folder}: {difference}: "
            "give a teacher and a student with one tokenizer",
            USAGE,
        )


def _vocabulary_difference(student: Any, teacher: Any) -> str:
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    for token in sorted(ours.keys() | theirs.keys(), key=lambda token: (ours.get(token, theirs.get(token)), token)):
        if ours.get(token) != theirs.get(token):
            said = [f"id {one[token]}" if token in one else "missing" for one in (theirs, ours)]
            return f"token {reprlib.repr(token)} is {said[0]} in the teacher's and {said[1]} in the student's"
    return ""


def _reading_difference(student: Any, teacher: Any) -> str:
    ids = sorted(student.get_vocab().values())
    # The texts of neighbouring tokens, joined, ask for every merge, which a vocabulary alone does not tell.
    texts = [student.decode(ids[start : start + TOKENS]) for start in range(0, len(ids), TOKENS)]
    for text in (*PROBES, *texts):
        ours, theirs = (one(text, verbose=False)["input_ids"] for one in (student, teacher))
        if ours != theirs:
            same = len(commonprefix([ours, theirs]))
            said = f"{theirs[same : same + 4]}, not {ours[same : same + 4]}, from token {same} on"
            return f"the teacher's reads {reprlib.repr(text)} as {said}"
    return ""
