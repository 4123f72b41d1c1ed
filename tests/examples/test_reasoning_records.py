"""Word problems: every label and rationale is worked out again from the words, and nothing that is tested was seen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compress.training.records import Record, read_records
from examples.reasoning_records import main

WORDS = {
    r"buys (\d+) more": "+",
    r"finds (\d+) more": "+",
    r"is given (\d+) more": "+",
    r"gives away (\d+)": "-",
    r"loses (\d+)": "-",
    r"sells (\d+)": "-",
    r"there are (\d+) times as many": "*",
    r"each of the (\d+) has the same": "/",
}
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


def chain(record: Record) -> list[tuple[str, int]]:
    """The operations in a problem, the number it starts with first."""
    first, *sentences = record.input.split(".")[:-1]
    found = [(sign, int(match[1])) for s in sentences for word, sign in WORDS.items() if (match := re.search(word, s))]
    assert len(found) == len(sentences)
    return [("=", int(first.split()[2])), *found]


def test_problems_are_right_and_none_comes_twice(tmp_path: Path) -> None:
    main(["--output", str(tmp_path), "--train", "300", "--test", "50", "--steps", "2", "4", "--largest", "12"])
    train, test = (read_records(tmp_path / name, rationales=True) for name in ("train.jsonl", "test.jsonl"))
    assert (len(train), len(test)) == (300, 50)
    for record in train + test:
        (_, value), *steps = chain(record)
        ways = []
        assert 2 <= len(steps) <= 4
        for sign, number in steps:
            before, value = value, OPERATIONS[sign](value, number)
            assert value * number == before if sign == "/" else 1 <= value <= 12
            ways.append(f"{before} {sign} {number} = {value}.")
        assert record.label == str(value) and record.rationale is not None
        assert record.rationale.split(". ", 1)[1].startswith(" ".join(ways)) and record.rationale.endswith(f" {value}.")
    assert len({str(chain(record)) for record in train + test}) == 350
    assert {sign for record in train for sign, _ in chain(record)} == set("=+-*/")


def test_seed_decides(tmp_path: Path) -> None:
    for name, seed in (("first", "1"), ("again", "1"), ("other", "2")):
        main(["--output", str(tmp_path / name), "--train", "20", "--test", "5", "--seed", seed])
    first, again, other = ((tmp_path / name / "train.jsonl").read_text() for name in ("first", "again", "other"))
    assert first == again != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "3", "2"], "--steps LEAST MOST from 1 on"),
        (["--test", "0"], "--train and --test from 1 on"),
        (["--steps", "1", "1", "--largest", "4"], "there are not that many problems"),
    ],
)
def test_what_cannot_be_made(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path / "out"), *arguments])
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
