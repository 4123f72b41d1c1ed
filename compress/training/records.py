"""Distilling step by step (arXiv 2305.02301): records with input, label and rationale, each two tasks for a student.

The student learns to answer behind one prefix and to give its reasons behind another, so reasons cost nothing when it
only has to answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from compress.errors import InputError, did_you_mean
from compress.runtime.generate import Sampling, generate, stop_tokens
from compress.runtime.load import Model
from compress.texts import start_tokens
from compress.training.sequences import Sequences, bundle, pad_token, padded
from compress.training_settings import Data

Progress = Callable[[int, int], None]
Row = tuple[list[int], list[float]]  # tokens, and how much each of them counts

FIELDS = ("input", "label", "rationale")
# Between what is asked and what is answered.
SEPARATOR = "\n"


@dataclass(frozen=True)
class Record:
    """A question, its answer, and the reasons for it, if there are any."""

    input: str
    label: str
    rationale: str | None = None


def read_records(file: Path, rationales: bool) -> list[Record]:
    """The records in `file`, one JSON object per line; further fields are passed over.

    Numbers are read as text. Raises InputError for a file that cannot be read or holds none, and for a line that is not
    an object or lacks a field; `rationale` may be missing unless `rationales`.
    """
    records = []
    for where, row in _rows(file):
        if not isinstance(row, dict):
            raise InputError(f"{where}: is not an object with the fields {', '.join(FIELDS)}: write one per line")
        text = _field(row, "input", where), _field(row, "label", where)
        has_reasons = rationales or row.get("rationale") is not None
        records.append(Record(*text, _field(row, "rationale", where) if has_reasons else None))
    if not records:
        raise InputError(f"{file}: holds no records: write one JSON object with {', '.join(FIELDS)} per line")
    return records


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield f"{file}: line {number}", json.loads(line.decode("utf-8"))
    except OSError as error:
        raise _unreadable(file, error) from None
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{file}: line {number} is not JSON: {reason}: write one object per line") from None


def _unreadable(file: Path, error: OSError) -> InputError:
    return InputError(f"{file}: cannot be read: {error.strerror}: name a file of JSON lines in data.source")


def _field(row: dict[str, Any], name: str, where: str) -> str:
    if name not in row:
        found = ", ".join(map(repr, row)) or "none"
        strangers = [key for key in row if key not in FIELDS]
        hint = next((hint for key in strangers if (hint := did_you_mean(key, [name]))), "")
        raise InputError(f"{where}: has no field {name!r} (fields: {found}){hint}")
    value = row[name]
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where}: field {name!r} is {value!r}: give a text or a number")
    return value.strip()


def file_sha256(file: Path) -> str:
    """The sha256 of the bytes of `file`. Raises InputError where they cannot be read."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(file, error) from None


def choose(records: list[Record], data: Data, file: Path) -> tuple[list[Record], list[str]]:
    """As many records as `data.sequences` says, in order, chosen by the seed, and what is to be noted of that."""
    if len(records) < data.sequences:
        return records, [f"{file}: holds {len(records)} records, not the {data.sequences} asked for"]
    if len(records) == data.sequences:
        return records, []
    order = torch.randperm(len(records), generator=torch.Generator().manual_seed(data.seed))
    chosen = order[: data.sequences].sort().values.tolist()
    return [records[i] for i in chosen], [f"{file}: {len(chosen)} of its {len(records)} records are used"]


def as_sequences(records: Sequence[Record], data: Data, tokenizer: Any, file: Path) -> Sequences:
    """Two rows per record, its label and its rationale, each behind its prompt and ended by the end-of-text token.

    A token of a label weighs alpha / (tokens of that label), one of a rationale (1 - alpha) / (tokens of that
    rationale), one of a prompt 0: the weighted mean is alpha * mean label loss + (1 - alpha) * mean rationale loss, in
    which each record counts the same. The two rows of a record are a group, so that this holds for every batch. A
    record without a rationale, or with one that does not fit into `data.seqlen`, has a second row without weight, and
    the other rationales weigh the more. With alpha 1 there are labels only, with alpha 0 rationales only.

    A record whose label does not fit is left out. Both are counted in the notes. Raises InputError where nothing is
    left, and for a tokenizer without an end-of-text token.
    """
    if tokenizer.eos_token_id is None:
        raise InputError("tokenizer: has no eos_token, with which an answer ends: set one in tokenizer_config.json")
    reasons = [None if data.alpha == 1 else record.rationale for record in records]
    pairs = [
        (
            _task(tokenizer, data.label_prefix + record.input, record.label, data.seqlen),
            None if reason is None else _task(tokenizer, data.rationale_prefix + record.input, reason, data.seqlen),
        )
        for record, reason in zip(records, reasons, strict=True)
    ]
    fitting = [(label, reason) for label, reason in pairs if label is not None]
    explained = sum(reason is not None for _, reason in fitting)
    if not fitting or (data.alpha < 1 and not explained):
        what = "rationale" if fitting else "label"
        raise InputError(
            f"{file}: no {what} of {len(records)} records fits: set data.seqlen to more than {data.seqlen}"
        )
    pad = pad_token(tokenizer)
    rows: list[Row] = []
    for label, reason in fitting:
        if data.alpha > 0:
            rows.append(_scaled(label, data.alpha))
        if reason is not None:
            rows.append(_scaled(reason, (1 - data.alpha) * len(fitting) / explained))
        elif 0 < data.alpha < 1:
            rows.append(([pad], [0.0]))
    ids, weights = padded(rows, pad)
    told = {
        "alpha": data.alpha,
        "prefixes": {"label": data.label_prefix, "rationale": data.rationale_prefix},
        "records": len(fitting),
        "explained": explained,
    }
    lacking = {
        "do not fit and are left out": len(pairs) - len(fitting),
        "have no rationale that fits": 0 if data.alpha == 1 else len(fitting) - explained,
    }
    notes = [f"{file}: {count} of {len(pairs)} records {reason}" for reason, count in lacking.items() if count]
    return bundle(ids, weights, told | {"notes": notes}, 2 if 0 < data.alpha < 1 else 1)


def _task(tokenizer: Any, question: str, answer: str, seqlen: int) -> Row | None:
    """Tokens of prompt and answer, the answer's weighing 1 together; None if they are more than `seqlen`."""
    prompt = prompt_tokens(tokenizer, question)
    target = [*_encode(tokenizer, answer), tokenizer.eos_token_id]
    if len(prompt) + len(target) > seqlen:
        return None
    return prompt + target, [0.0] * len(prompt) + [1 / len(target)] * len(target)


def _scaled(row: Row, factor: float) -> Row:
    return row[0], [factor * count for count in row[1]]


def prompt_tokens(tokenizer: Any, question: str) -> list[int]:
    """What a student is asked: `question`, its task's prefix included, and the end of a line."""
    return start_tokens(tokenizer) + _encode(tokenizer, question + SEPARATOR)


def with_written_rationales(
    records: Sequence[Record], data: Data, model: Model, tokenizer: Any, progress: Progress | None = None
) -> tuple[list[Record], dict[str, Any]]:
    """`records` with the rationales that `model` writes to `data.template`, and counts of what became of them.

    What it writes up to `data.answer` is the rationale, the rest of that line its answer. A rationale whose answer is
    not the label, but for spaces and full stops around it, is not heeded. Record i is sampled by seed `data.seed` + i.
    Raises InputError where none is left.
    """
    counts = {"agreed": 0, "other answer": 0, "no answer": 0}
    explained = []
    for number, record in enumerate(records):
        sampling = Sampling(data.temperature, seed=data.seed + number)
        text = _answer(model, tokenizer, data.template.format(input=record.input), sampling, data)
        reasons, found, rest = text.partition(data.answer)
        agrees = found and plain(rest.lstrip().partition("\n")[0]) == plain(record.label) and reasons.strip()
        counts["agreed" if agrees else "other answer" if found else "no answer"] += 1
        explained.append(replace(record, rationale=reasons.strip() if agrees else None))
        if progress is not None:
            progress(number + 1, len(records))
    if not counts["agreed"]:
        raise InputError(
            f"data.rationales: of {len(records)} that the teacher wrote, {counts['other answer']} led to another "
            f"answer than the label and {counts['no answer']} to none behind {data.answer!r}: show in data.template "
            "how to answer, or read rationales from the file"
        )
    told = {"template": data.template, "answer": data.answer, "temperature": data.temperature, "rationales": counts}
    return explained, told


def _answer(model: Model, tokenizer: Any, prompt: str, sampling: Sampling, data: Data) -> str:
    """What the model writes behind `prompt`, up to the end of the line on which its answer stands."""
    tokens: list[int] = []
    text = ""
    stop = stop_tokens(model.folder)
    asked = start_tokens(tokenizer) + _encode(tokenizer, prompt)
    for token in generate(model, asked, data.max_new, sampling, stop):
        tokens.append(token)
        text = str(tokenizer.decode(tokens, skip_special_tokens=True))
        if "\n" in text.partition(data.answer)[2].lstrip():
            break
    return text


def accuracy(model: Model, records: Sequence[Record], tokenizer: Any, prefix: str, max_new: int = 32) -> float:
    """The share of `records` that `model` answers with the label, exactly but for spaces and full stops around it.

    It is asked as as_sequences asks, behind `prefix`, and answers greedily with at most `max_new` tokens. Raises
    InputError where there are no records.
    """
    if not records:
        raise InputError("records: are none: an accuracy needs one at least")
    stop = stop_tokens(model.folder) | {tokenizer.eos_token_id}
    right = 0
    for record in records:
        prompt = prompt_tokens(tokenizer, prefix + record.input)
        tokens = list(generate(model, prompt, max_new, Sampling(), frozenset(stop)))
        right += plain(str(tokenizer.decode(tokens, skip_special_tokens=True))) == plain(record.label)
    return right / len(records)


def plain(answer: str) -> str:
    """An answer as it is compared: single spaces, and neither space nor full stop nor colon at its ends."""
    return " ".join(answer.split()).strip(" .:")


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
