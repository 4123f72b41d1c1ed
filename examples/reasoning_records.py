"""Records for distilling step by step: small word problems that take several steps of arithmetic, made by seed.

    python examples/reasoning_records.py --output build/reasoning

writes train.jsonl and test.jsonl there, each line an object with `input` (the problem), `label` (a whole number) and
`rationale` (the steps that lead to it, one equation each). No problem has the numbers and operations of another, so
what is tested was never seen. It needs no package and no network, and every rationale is right.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NAMES = ("Tom", "Ann", "Ben", "Eva", "Max", "Lia", "Sam", "Mia", "Leo", "Zoe")
THINGS = ("apples", "books", "coins", "shells", "stamps", "cards", "marbles", "pens")
# How each operation may be told.
GAINS = ("buys {n} more", "finds {n} more", "is given {n} more")
LOSSES = ("gives away {n}", "loses {n}", "sells {n}")
GROWTHS = ("gets so many more that there are {n} times as many",)
SHARES = ("shares them equally with others, so that each of the {n} has the same",)
FACTORS = (2, 3, 4)
TRIES = 1000


@dataclass(frozen=True)
class Step:
    """One operation: its sign, its number, and what the number of things is after it."""

    sign: str
    number: int
    result: int


def steps_of(start: int, count: int, largest: int, generator: random.Random) -> list[Step]:
    """`count` operations from `start` on, all of whose results are whole and from 1 to `largest`."""
    steps: list[Step] = []
    value = start
    while len(steps) < count:
        sign = generator.choice("+-*/")
        number = generator.choice(FACTORS) if sign in "*/" else generator.randint(1, largest // 2)
        results = {"+": value + number, "-": value - number, "*": value * number, "/": value // number}
        if (sign == "/" and value % number) or not 1 <= results[sign] <= largest:
            continue
        value = results[sign]
        steps.append(Step(sign, number, value))
    return steps


def record_of(start: int, steps: list[Step], generator: random.Random) -> dict[str, str]:
    """The problem in words, its answer, and the way to it."""
    name, things = generator.choice(NAMES), generator.choice(THINGS)
    tales = {"+": GAINS, "-": LOSSES, "*": GROWTHS, "/": SHARES}
    told = [f"{name} {generator.choice(tales[step.sign]).format(n=step.number)}." for step in steps]
    values = [start, *(step.result for step in steps)]
    ways = [f"{value} {step.sign} {step.number} = {step.result}." for value, step in zip(values, steps, strict=False)]
    return {
        "input": " ".join([f"{name} has {start} {things}.", *told, f"How many {things} does {name} have now?"]),
        "label": str(values[-1]),
        "rationale": " ".join([f"At first there are {start}.", *ways, f"So {name} has {values[-1]}."]),
    }


def records(steps: tuple[int, int], largest: int, seed: int) -> Iterator[dict[str, str]]:
    """Problems of `steps` (least, most) operations with numbers up to `largest`, without end but for TRIES in vain."""
    generator = random.Random(seed)
    seen = set()
    vain = 0
    while vain < TRIES:
        start = generator.randint(1, largest)
        chain = steps_of(start, generator.randint(*steps), largest, generator)
        key = (start, *((step.sign, step.number) for step in chain))
        if key in seen:
            vain += 1
            continue
        vain = 0
        seen.add(key)
        yield record_of(start, chain, generator)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for train.jsonl and test.jsonl")
    parser.add_argument("--train", type=int, default=1000, help="problems in train.jsonl")
    parser.add_argument("--test", type=int, default=200, help="problems in test.jsonl")
    parser.add_argument("--steps", type=int, nargs=2, default=(2, 3), metavar=("LEAST", "MOST"), help="operations each")
    parser.add_argument("--largest", type=int, default=20, help="no number is above this")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Parse arguments and write both files."""
    parser = options()
    given = parser.parse_args(arguments)
    least, most = given.steps
    if not 1 <= least <= most or given.largest < 4 or given.train < 1 or given.test < 1:
        parser.error("--steps LEAST MOST from 1 on, --largest from 4 on, --train and --test from 1 on")
    made = records((least, most), given.largest, given.seed)
    wanted = {"train.jsonl": given.train, "test.jsonl": given.test}
    files = {name: [record for _, record in zip(range(count), made, strict=False)] for name, count in wanted.items()}
    if len(files["test.jsonl"]) < given.test:
        parser.error("there are not that many problems: raise --largest or --steps, or ask for fewer")
    given.output.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        (given.output / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        print(f"{given.output / name}: {len(lines)} problems")


if __name__ == "__main__":
    main()
