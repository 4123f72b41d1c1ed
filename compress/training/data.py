"""The data of a distill stage: text, conversations, records, or what the teacher writes, as weighted sequences."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from compress import texts
from compress.checkpoint.tokenizer import load_tokenizer
from compress.errors import InputError
from compress.runtime.generate import Sampling, start_token, write_sequences
from compress.runtime.load import load_model
from compress.training import conversations
from compress.training.records import (
    Progress,
    as_sequences,
    choose,
    file_sha256,
    read_records,
    with_written_rationales,
)
from compress.training.sequences import Sequences, bundle, held_last, rows_of, split
from compress.training_settings import SELF, Data

__all__ = ["Sequences", "rows_of", "sequences_of", "split"]

# How often the teacher may write again what was dropped.
ROUNDS = 4
# Length of the runs of tokens that may repeat.
RUN = 4


def sequences_of(
    data: Data,
    source: Path | str,
    teacher: Path,
    device: torch.device,
    kept: Path | None = None,
    progress: Progress | None = None,
) -> Sequences:
    """The sequences that `data` names, the held-out ones last. `source` is data.source with its placeholders filled in.

    The tokenizer is that of `teacher`, a checkpoint folder. What the teacher writes it writes on `device`, telling
    `progress` how much is done and how much there will be; that is kept in file `kept`, where one is named and its
    folder exists, and read from there when the same is asked for again. Fewer sequences than asked for are a note.
    Raises InputError for a source that is missing or unreadable, for text that leaves none to train on, and where
    nothing of what the teacher wrote can be used.
    """
    tokenizer = load_tokenizer(teacher)
    from_records = data.records and data.rationales == "teacher" and data.alpha < 1
    key = {"data": data.model_dump(mode="json"), "source": str(source), "teacher": str(teacher)}
    if from_records:
        key["sha256"] = file_sha256(Path(source))
    if (from_records or data.source == SELF) and kept is not None and (found := _read(kept, key)) is not None:
        return found
    description: dict[str, Any] = {"source": data.source, "seed": data.seed, "chat": data.chat}
    if data.records:
        made = _from_records(data, Path(source), tokenizer, (teacher, device), progress)
    elif data.source == SELF:
        ids, told = written(data, teacher, device, progress)
        made = bundle(ids, _all(ids), told)
    elif data.chat:
        ids, weights, notes = conversations.packed(data, source, tokenizer)
        made = bundle(ids, weights, {"notes": notes})
    else:
        documents = texts.read_documents(source)
        found_text = texts.encode_and_pack(documents, tokenizer, data.sequences, data.seqlen, data.seed, source)
        made = bundle(found_text.ids, _all(found_text.ids), {"notes": list(found_text.notes)})
    made = held_last(replace(made, description=description | made.description), data.held_out)
    if (from_records or data.source == SELF) and kept is not None and kept.parent.exists():
        _write(kept, key, made)
    return made


def written(
    data: Data, teacher: Path, device: torch.device, progress: Progress | None
) -> tuple[Tensor, dict[str, Any]]:
    """What the teacher writes by itself, int64 [N, seqlen], and how: sequence-level distillation (arXiv 1606.07947).

    Its samples stand for its distribution over whole texts, so a student that learns them learns that. A sequence in
    which more than `max_repetition` of the runs of tokens repeat, and one that was written before, is dropped, counted
    and written anew, at most ROUNDS times. Raises InputError where all are dropped.
    """
    start = start_token(teacher)
    model = load_model(teacher, device)
    kept: dict[tuple[int, ...], None] = {}
    dropped = {"repetitive": 0, "identical": 0}
    total = 0
    for attempt in range(ROUNDS):
        missing = data.sequences - len(kept)
        if not missing:
            break
        ids = write_sequences(
            model,
            start,
            (missing, data.seqlen),
            Sampling(data.temperature, seed=data.seed + attempt),
            _behind(progress, total * data.seqlen),
        )
        total += missing
        for row in ids:
            tokens = tuple(row.tolist())
            if repetition(row) > data.max_repetition:
                dropped["repetitive"] += 1
            elif tokens in kept:
                dropped["identical"] += 1
            else:
                kept[tokens] = None
    if not kept:
        raise InputError(
            f"data.source: all {total} sequences that the teacher wrote were dropped "
            f"({dropped['repetitive']} repeat themselves, {dropped['identical']} another): raise data.temperature or "
            "data.max_repetition, or name a text"
        )
    notes = [
        f"{count} of {total} written sequences were dropped: {reason}" for reason, count in dropped.items() if count
    ]
    if len(kept) < data.sequences:
        notes.append(f"{len(kept)} written sequences are left, not the {data.sequences} asked for")
    told = {"temperature": data.temperature, "max_repetition": data.max_repetition, "written": total}
    return torch.tensor(list(kept)), told | {"dropped": dropped, "notes": notes}


def repetition(ids: Tensor) -> float:
    """The share of the runs of RUN tokens in ids [T] that repeat an earlier one (seq-rep-n of arXiv 1908.04319)."""
    if len(ids) < RUN:
        return 0.0
    runs = ids.unfold(0, RUN, 1)
    return 1 - len(runs.unique(dim=0)) / len(runs)


def _behind(progress: Progress | None, done: int) -> Progress | None:
    """`progress` for work that comes after `done` units."""
    return None if progress is None else lambda more, total: progress(done + more, done + total)


def _from_records(
    data: Data, file: Path, tokenizer: Any, writer: tuple[Path, torch.device], progress: Progress | None
) -> Sequences:
    """The two tasks of each record, with rationales by the teacher on its device (`writer`) where it is to write."""
    by_teacher = data.rationales == "teacher"
    records = read_records(file, rationales=data.alpha < 1 and not by_teacher)
    records, notes = choose(records, data, file)
    told: dict[str, Any] = {}
    if by_teacher and data.alpha < 1:
        records, told = with_written_rationales(records, data, load_model(*writer), tokenizer, progress)
    made = as_sequences(records, data, tokenizer, file)
    return replace(made, description=made.description | told | {"notes": notes + made.description["notes"]})


def _all(ids: Tensor) -> Tensor:
    """Weights where every prediction counts."""
    weights = torch.ones(ids.shape)
    weights[:, -1] = 0
    return weights


def _write(file: Path, key: dict[str, Any], made: Sequences) -> None:
    told = {"key": json.dumps(key), "description": json.dumps(made.description), "group": str(made.group)}
    unfinished = file.with_suffix(".unfinished")
    save_file({"ids": made.ids.contiguous(), "weights": made.weights.contiguous()}, unfinished, told)
    unfinished.rename(file)


def _read(file: Path, key: dict[str, Any]) -> Sequences | None:
    """What `file` keeps, None if there is no such file or it was written for another `key`."""
    if not file.exists():
        return None
    with safe_open(file, "pt") as stored:
        told = stored.metadata()
        if json.loads(told["key"]) != key:
            return None
        ids, weights = stored.get_tensor("ids"), stored.get_tensor("weights")
    return bundle(ids, weights, json.loads(told["description"]), int(told["group"]))
