"""Distilling step by step: weights by hand, the mixture against a plain loop, rationales that a teacher writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import InputError
from compress.runtime.generate import Sampling, generate
from compress.runtime.load import Model, load_model
from compress.training import data as training_data
from compress.training import records as training_records
from compress.training.data import rows_of, sequences_of
from compress.training.records import Record, accuracy, as_sequences, plain, read_records, with_written_rationales
from compress.training.sequences import Sequences
from compress.training_settings import Data
from tests.tiny import byte_tokenizer

CPU = torch.device("cpu")
EOS, PAD = 257, 258
FILE = Path("records.jsonl")
RECORDS = [Record("1+1", "2", "one and one"), Record("2+2+2", "six", "4 and 2"), Record("3", "3", "it is")]


# One token per byte, but its ids are not their values.
BYTES = byte_tokenizer()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return BYTES


def codes(text: str) -> list[int]:
    return list(BYTES(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Model:
    return load_model(tiny_llama)


def settings(**changes: Any) -> Data:
    return Data.model_validate(
        {"source": "x", "records": True, "sequences": 3, "held_out": 1, "label_prefix": "L ", "rationale_prefix": "R "}
        | changes
    )


def write(file: Path, *rows: object) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_weights_by_hand(tokenizer: Any) -> None:
    made = as_sequences(RECORDS[1:2], settings(alpha=0.25, seqlen=20), tokenizer, FILE)
    label, reason = codes("L 2+2+2\nsix"), codes("R 2+2+2\n4 and 2")
    assert made.ids.tolist() == [[*label, EOS, PAD, PAD, PAD, PAD], [*reason, EOS]]
    prompt = [0.0] * 7
    assert made.weights[0].tolist() == [*prompt, *[0.25 / 4] * 4, 0, 0, 0, 0, 0]
    assert made.weights[1].tolist() == pytest.approx([*prompt, *[0.75 / 8] * 8, 0], abs=1e-9)
    assert made.group == 2 and made.description["notes"] == []
    assert made.description["prefixes"] == {"label": "L ", "rationale": "R "} and made.description["alpha"] == 0.25
    assert (made.description["records"], made.description["explained"], made.description["weighed"]) == (1, 1, 12)


def position_losses(ids: torch.Tensor) -> torch.Tensor:
    """Some loss of every position, float64 [N, T]."""
    return torch.rand(ids.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def weighted_mean(made: Sequences, losses: torch.Tensor, rows: torch.Tensor) -> float:
    """As a training step takes it."""
    weights = made.weights[rows].double()
    return float((weights * losses[rows]).sum() / weights.sum())


def slow_mixture(records: list[Record], losses: torch.Tensor, alpha: float, numbers: list[int]) -> float:
    """alpha * mean label loss + (1 - alpha) * mean rationale loss, of records `numbers`, token by token."""
    of_labels: list[float] = []
    of_reasons: list[float] = []
    for number in numbers:
        record = records[number]
        assert record.rationale is not None
        for row, answer, means in ((0, record.label, of_labels), (1, record.rationale, of_reasons)):
            begin = len(f"L {record.input}\n") - 1  # where the answer's first token is predicted
            told = [float(losses[2 * number + row, begin + token]) for token in range(len(answer) + 1)]
            means.append(sum(told) / len(told))
    return alpha * sum(of_labels) / len(of_labels) + (1 - alpha) * sum(of_reasons) / len(of_reasons)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.8])
def test_the_mixture_is_exact_over_all_and_in_every_batch(tokenizer: Any, alpha: float) -> None:
    made = as_sequences(RECORDS, settings(alpha=alpha), tokenizer, FILE)
    losses = position_losses(made.ids)
    wanted = slow_mixture(RECORDS, losses, alpha, [0, 1, 2])
    assert weighted_mean(made, losses, torch.arange(6)) == pytest.approx(wanted, rel=1e-6)
    for step in range(6):
        rows = rows_of(step, 4, 6, 0, made.group)
        numbers = [int(row) // 2 for row in rows[::2]]
        wanted = slow_mixture(RECORDS, losses, alpha, numbers)
        assert weighted_mean(made, losses, rows) == pytest.approx(wanted, rel=1e-6)


def test_a_record_without_rationale_keeps_its_label_and_the_mixture(tokenizer: Any) -> None:
    """One rationale is missing and one does not fit: two rows without weight, the third rationale weighs thrice."""
    records = [RECORDS[0], Record("2+2+2", "six"), Record("3", "3", "y" * 30)]
    made = as_sequences(records, settings(alpha=0.5, seqlen=20), tokenizer, FILE)
    assert (
        made.weights.sum(1).tolist() == pytest.approx([0.5, 1.5, 0.5, 0, 0.5, 0]) and made.ids[3].tolist() == [PAD] * 18
    )
    losses = position_losses(made.ids)
    total = float(made.weights.double().sum())
    labels = [float((made.weights[row].double() * losses[row]).sum()) / 0.5 for row in (0, 2, 4)]
    reason = slow_mixture(records, losses, 0.0, [0])
    assert weighted_mean(made, losses, torch.arange(6)) == pytest.approx(sum(labels) / 6 + reason / 2, rel=1e-6)
    assert total == pytest.approx(3)
    assert made.description["notes"] == ["records.jsonl: 2 of 3 records have no rationale that fits"]


def test_ends_of_alpha(tokenizer: Any) -> None:
    labels = as_sequences(RECORDS, settings(alpha=1, seqlen=13), tokenizer, FILE)
    assert len(labels.ids) == 3 and labels.group == 1 and labels.description["notes"] == []
    assert labels.weights.sum(1).tolist() == pytest.approx([1, 1, 1])
    assert labels.ids[0].tolist()[:8] == [*codes("L 1+1\n2"), EOS]
    reasons = as_sequences(RECORDS, settings(alpha=0), tokenizer, FILE)
    assert len(reasons.ids) == 3 and reasons.group == 1 and reasons.ids[0].tolist()[:6] == codes("R 1+1\n")


def test_what_does_not_fit(tokenizer: Any) -> None:
    made = as_sequences(RECORDS, settings(alpha=1, seqlen=9), tokenizer, FILE)
    assert len(made.ids) == 2 and made.description["notes"] == [
        "records.jsonl: 1 of 3 records do not fit and are left out"
    ]
    with pytest.raises(InputError, match="no rationale of 3 records fits: set data.seqlen to more than 9"):
        as_sequences(RECORDS, settings(alpha=0.5, seqlen=9), tokenizer, FILE)
    with pytest.raises(InputError, match="no label of 3 records fits: set data.seqlen to more than 5"):
        as_sequences(RECORDS, settings(alpha=1, seqlen=5), tokenizer, FILE)


def test_an_answer_must_end(tokenizer: Any) -> None:
    endless = byte_tokenizer()
    endless.eos_token = None
    with pytest.raises(InputError, match="tokenizer: has no eos_token"):
        as_sequences(RECORDS, settings(), endless, FILE)


def test_records_are_read(tiny_llama: Path, tmp_path: Path) -> None:
    rows = [{"input": "a", "label": 7, "rationale": " since ", "more": 1}, {"input": "b", "label": -0.5}]
    file = write(tmp_path / "records.jsonl", *rows)
    file.write_text(file.read_text() + "\n")
    assert read_records(file, rationales=False) == [Record("a", "7", "since"), Record("b", "-0.5")]
    rows = [{"input": f"{i:02}", "label": i, "rationale": "so"} for i in range(10)]
    file = write(tmp_path / "records.jsonl", *rows)
    made = sequences_of(settings(sequences=4, seqlen=12), file, tiny_llama, CPU)
    assert made.ids.shape == (8, 8) and made.description["notes"] == [f"{file}: 4 of its 10 records are used"]
    inputs = [int(BYTES.decode(row[2:4])) for row in made.ids.tolist()]
    assert inputs[::2] == inputs[1::2], "a record's rows stay together"
    assert [*inputs[:4:2], inputs[6], inputs[4]] == sorted(inputs[::2]), "in order but for the third, which is held out"
    other = sequences_of(settings(sequences=4, seqlen=12, seed=1), file, tiny_llama, CPU)
    assert other.sha256 != made.sha256
    made = sequences_of(settings(sequences=40, seqlen=12), file, tiny_llama, CPU)
    assert made.description["notes"] == [f"{file}: holds 10 records, not the 40 asked for"]
    with pytest.raises(InputError, match="data.held_out: is 10, and there are 10 sequences in all"):
        sequences_of(settings(sequences=40, held_out=10, seqlen=12), file, tiny_llama, CPU)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"input": "a", "label": "b", "rational": "c"}',
            "line 2: has no field 'rationale' .*; did you mean 'rationale'",
        ),
        ('{"input": "a", "rationale": "c"}', r"line 2: has no field 'label' \(fields: 'input', 'rationale'\)$"),
        ('{"imput": "a", "label": "b"}', "line 2: has no field 'input' .*; did you mean 'input'"),
        ("{}", r"line 2: has no field 'input' \(fields: none\)"),
        ('{"input": "a", "label": true, "rationale": "c"}', "line 2: field 'label' is True: give a text or a number"),
        ('{"input": " ", "label": "b", "rationale": "c"}', "line 2: field 'input' is ' ': give a text or a number"),
        ('{"input": "a", "label": "b", "rationale": null}', "line 2: field 'rationale' is None"),
        ("[]", "line 2: is not an object with the fields input, label, rationale"),
        ("{", "line 2 is not JSON: .*: write one object per line"),
    ],
)
def test_bad_lines(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text('{"input": "a", "label": "b", "rationale": "c"}\n' + line + "\n")
    with pytest.raises(InputError, match=f"records.jsonl: {message}"):
        read_records(file, rationales=True)


def test_bad_files(tmp_path: Path, tiny_llama: Path) -> None:
    with pytest.raises(InputError, match="none.jsonl: cannot be read: No such file"):
        read_records(tmp_path / "none.jsonl", rationales=True)
    with pytest.raises(InputError, match="none.jsonl: cannot be read: No such file"):
        sequences_of(settings(rationales="teacher", template="{input}"), tmp_path / "none.jsonl", tiny_llama, CPU)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="empty.jsonl: holds no records"):
        read_records(tmp_path / "empty.jsonl", rationales=True)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(InputError, match="binary.jsonl: line 1 is not JSON: 'utf-8' codec"):
        read_records(tmp_path / "binary.jsonl", rationales=True)


def speak(monkeypatch: pytest.MonkeyPatch, *answers: str) -> list[tuple[str, int, Sampling]]:
    """Have the runtime write `answers` in turn, a byte at a time; returns what it was asked, and how much was taken."""
    asked: list[tuple[str, int, Sampling]] = []

    def say(model: Model, prompt: list[int], max_new: int, sampling: Sampling, stop: frozenset[int]) -> Iterator[int]:
        assert EOS in stop
        number = len(asked)
        asked.append((BYTES.decode(prompt), 0, sampling))
        for token in codes(answers[number])[:max_new]:
            asked[number] = (asked[number][0], asked[number][1] + 1, sampling)
            yield token

    monkeypatch.setattr(training_records, "generate", say)
    return asked


WRITTEN = (
    "One and one.\nThe answer is  2.\nQ: and so on",  # right; the rest of what it writes is not waited for
    "Four and two. The answer is seven.",
    "It is what it is.",
    "The answer is 4",  # an answer without reasons
)


def test_rationales_by_the_teacher(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, model: Model) -> None:
    asked = speak(monkeypatch, *WRITTEN)
    data = settings(rationales="teacher", template="Q: {input} {{}}\nA:", temperature=0.5, seed=3)
    told: list[tuple[int, int]] = []
    records = [*RECORDS, Record("4", "4")]
    found, description = with_written_rationales(
        records, data, model, tokenizer, lambda done, total: told.append((done, total))
    )
    assert [record.rationale for record in found] == ["One and one.", None, None, None]
    assert [record.label for record in found] == ["2", "six", "3", "4"]
    assert asked[0] == ("Q: 1+1 {}\nA:", len("One and one.\nThe answer is  2.\n"), Sampling(0.5, seed=3))
    assert [sampling.seed for _, _, sampling in asked] == [3, 4, 5, 6] and told[-1] == (4, 4)
    assert description["rationales"] == {"agreed": 1, "other answer": 2, "no answer": 1}
    assert (description["template"], description["temperature"]) == (data.template, 0.5)
    speak(monkeypatch, *WRITTEN)
    with pytest.raises(
        InputError, match="of 1 that the teacher wrote, 1 led to another answer than the label and 0 to"
    ):
        with_written_rationales([Record("1+1", "3")], data, model, tokenizer)


def test_written_rationales_reach_the_sequences_and_are_kept(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: Path, tmp_path: Path
) -> None:
    rows = [{"input": record.input, "label": record.label} for record in RECORDS]
    file = write(tmp_path / "records.jsonl", *rows)
    data = settings(rationales="teacher", template="{input}", temperature=0)
    kept = tmp_path / "kept.safetensors"
    asked = speak(monkeypatch, *WRITTEN[:3])
    made = sequences_of(data, file, tiny_llama, CPU, kept)
    assert made.group == 2 and made.description["rationales"]["agreed"] == 1 and len(made.ids) == 6
    assert made.description["notes"] == [f"{file}: 2 of 3 records have no rationale that fits"]
    again = sequences_of(data, file, tiny_llama, CPU, kept)
    assert len(asked) == 3 and again.sha256 == made.sha256 and again.group == 2
    speak(monkeypatch, *WRITTEN[:3])
    write(file, *rows[:1], {"input": "5", "label": "seven"}, rows[2])
    other = sequences_of(data, file, tiny_llama, CPU, kept)
    assert other.description["rationales"]["agreed"] == 2, "what was kept for another file is not taken"
    monkeypatch.setattr(training_data, "load_model", None)
    labels = sequences_of(settings(rationales="teacher", template="{input}", alpha=1), file, tiny_llama, CPU)
    assert len(labels.ids) == 3, "labels alone need no teacher"


def test_accuracy_is_exact_match(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, model: Model) -> None:
    asked = speak(monkeypatch, " 2. ", "sixty", "3")
    assert accuracy(model, RECORDS, tokenizer, "L ", max_new=5) == pytest.approx(2 / 3)
    assert asked[1] == ("L 2+2+2\n", 5, Sampling())
    with pytest.raises(InputError, match="records: are none"):
        accuracy(model, [], tokenizer, "L ")


def test_accuracy_of_a_real_model(tokenizer: Any, model: Model) -> None:
    """Labels that the model itself would write are right, others are not."""
    prompt = codes("L 1+1\n")
    said = plain(
        tokenizer.decode(list(generate(model, prompt, 6, Sampling(), frozenset({EOS}))), skip_special_tokens=True)
    )
    assert said
    assert accuracy(model, [Record("1+1", said), Record("1+1", said + "x")], tokenizer, "L ", max_new=6) == 0.5


def test_plain() -> None:
    assert plain(" : 5.\n") == "5" and plain("a  b") == "a b" and plain("0.5") == "0.5"
