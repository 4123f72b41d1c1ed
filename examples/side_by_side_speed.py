"""lmpress beside transformers and llama.cpp: one model, each program a process of its own, in turn within one run.

    python examples/side_by_side_speed.py --checkpoint build/W4A16 --model build/demo/model \\
        --peer-python build/llama/bin/python --peer-gguf build/demo-q4_0.gguf

Every program holds its model for the whole run and waits while another one works, so that a machine that slows down
slows all of them alike; the ratio of medians is told. llama.cpp runs in the environment that --peer-python names, which
needs nothing but llama-cpp-python, and is left out without a GGUF file. With --busy-core each program also decodes
beside a process that spins on one core. Linux; nothing is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any

PEERS = Path(__file__).parent / "peers"
PROGRAMS = ("lmpress", "transformers-float32", "transformers-bfloat16", "llama.cpp")
# Idle threads of the program that ran last may spin a little before they sleep.
SETTLE = 0.2
SPIN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass"


class Peer:
    """A program that holds a model and answers timing requests (examples/peers/serving.py)."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the process)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, text=True
        )
        self.about = self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to one request. Exits with the end of what the program said where it has died."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # It is dead: there will be no answer, which says so.
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def prefill(self, batch: int, prompt: int, capacity: int) -> float:
        """Seconds for `prompt` tokens in each of `batch` fresh sequences with room for `capacity`."""
        return self.ask(do="prefill", batch=batch, prompt=prompt, capacity=capacity)["seconds"]

    def decode(self, new: int) -> float:
        """Seconds for `new` further tokens in each sequence."""
        return self.ask(do="decode", new=new)["seconds"]

    def close(self) -> None:
        """End the program, and wait until it has."""
        self.process.kill()
        self.process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.said.seek(0)
            last = " | ".join(line.strip() for line in self.said.readlines()[-3:])
            sys.exit(f"{self.name}: ended with {self.process.returncode}: {last}")
        return json.loads(line)


def main(given: Sequence[str] | None = None) -> None:
    """Parse arguments, time every program, print the tables and, with --json, write them."""
    arguments = options().parse_args(given)
    with ExitStack() as running:
        peers = []
        for name in arguments.programs.split(","):
            told = command(name, arguments)
            if told is not None:
                peers.append(Peer(name, told))
                running.callback(peers[-1].close)
        for peer in peers:
            print(f"{peer.name}: {', '.join(f'{key} {value}' for key, value in peer.about.items())}")
        rows = []
        for batch in map(int, arguments.batch.split(",")):
            rows += speed_rows(timed(peers, batch, arguments), batch, arguments)
        busy = busy_rows(disturbed(peers, arguments)) if arguments.busy_core is not None else []
        peaks = {peer.name: peer.ask(do="peak")["bytes"] for peer in peers}
    for line in tables(rows, busy, peaks):
        print(line)
    if arguments.json:
        programs = {peer.name: peer.about | {"peak_bytes": peaks[peer.name]} for peer in peers}
        arguments.json.write_text(json.dumps({"programs": programs, "speed": rows, "busy": busy}, indent=2) + "\n")


def options() -> argparse.ArgumentParser:
    """The command line."""
    cores = sorted(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="what lmpress runs")
    parser.add_argument("--model", type=Path, required=True, help="what transformers runs: the uncompressed model")
    parser.add_argument("--peer-gguf", type=Path, help="what llama.cpp runs: the same weights")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that can import llama_cpp")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help=f"default: {','.join(PROGRAMS)}")
    parser.add_argument("--batch", default="1", help="batch sizes, comma-separated")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(cores), help="of each program")
    parser.add_argument(
        "--busy-core", type=int, nargs="?", const=cores[-1], help=f"spin on this core (default {cores[-1]}) as well"
    )
    parser.add_argument("--busy-new", type=int, default=32, help="tokens decoded at a time beside the busy core")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    return parser


def command(name: str, arguments: argparse.Namespace) -> list[str] | None:
    """How to start a program; None for llama.cpp where it cannot be had."""
    threads = ["--threads", str(arguments.threads)]
    if name == "lmpress":
        return [sys.executable, str(PEERS / "lmpress_peer.py"), "--model", str(arguments.checkpoint), *threads]
    if name.startswith("transformers-"):
        script, dtype = str(PEERS / "transformers_peer.py"), name.removeprefix("transformers-")
        return [sys.executable, script, "--model", str(arguments.model), "--dtype", dtype, *threads]
    if name != "llama.cpp":
        sys.exit(f"--programs: {name!r} is not known: choose from {', '.join(PROGRAMS)}")
    if arguments.peer_gguf is None:
        print("llama.cpp: left out, since --peer-gguf names no file", file=sys.stderr)
        return None
    if subprocess.run([arguments.peer_python, "-c", "import llama_cpp"], capture_output=True).returncode:
        print(f"llama.cpp: left out, since {arguments.peer_python} cannot import llama_cpp", file=sys.stderr)
        return None
    return [arguments.peer_python, str(PEERS / "llama_cpp_peer.py"), "--model", str(arguments.peer_gguf), *threads]


def timed(peers: Sequence[Peer], batch: int, arguments: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Seconds of (prefill, decode) of each run of each program, in turn, after one run that is not counted."""
    found: dict[str, list[tuple[float, float]]] = {peer.name: [] for peer in peers}
    for number in range(arguments.repeat + 1):
        for peer in peers:
            show(f"batch {batch}, run {number} of {arguments.repeat}: {peer.name}")
            time.sleep(SETTLE)
            prefill = peer.prefill(batch, arguments.prompt, arguments.prompt + arguments.new)
            taken = (prefill, peer.decode(arguments.new))
            if number:
                found[peer.name].append(taken)
    return found


def disturbed(peers: Sequence[Peer], arguments: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Seconds of decoding (alone, beside the busy core) of each run of each program, in turn, at batch 1."""
    found: dict[str, list[tuple[float, float]]] = {peer.name: [] for peer in peers}
    for number in range(arguments.repeat):
        for peer in peers:
            show(f"busy core, run {number + 1} of {arguments.repeat}: {peer.name}")
            time.sleep(SETTLE)
            peer.prefill(1, arguments.prompt, arguments.prompt + 2 * arguments.busy_new)
            alone = peer.decode(arguments.busy_new)
            with spinning(arguments.busy_core):
                found[peer.name].append((alone, peer.decode(arguments.busy_new)))
    return found


@contextmanager
def spinning(core: int) -> Iterator[None]:
    """A process that keeps `core` busy for as long as the context lasts."""
    process = subprocess.Popen([sys.executable, "-c", SPIN, str(core)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def speed_rows(
    found: dict[str, list[tuple[float, float]]], batch: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row per phase and program: median tokens per second of all sequences, its quartiles, and the ratio of medians
    of the first program to this one."""
    rows: list[dict[str, Any]] = []
    for index, (phase, steps) in enumerate((("prefill", arguments.prompt), ("decode", arguments.new))):
        seconds = {name: [run[index] for run in runs] for name, runs in found.items()}
        first = median(next(iter(seconds.values())))
        for name, taken in seconds.items():
            low, _, high = quantiles(taken, n=4, method="inclusive") if len(taken) > 1 else (taken * 3)
            tokens = batch * steps
            row = {"phase": phase, "batch": batch, "prompt": arguments.prompt, "program": name, "runs": len(taken)}
            row |= {"tokens_per_s": tokens / median(taken), "tokens_per_s_iqr": [tokens / high, tokens / low]}
            rows.append(row | {"ratio": median(taken) / first})
    return rows


def busy_rows(found: dict[str, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    """The share of its idle decoding speed that each program keeps: the ratio of medians."""
    return [
        {
            "program": name,
            "seconds_alone": median(alone for alone, _ in runs),
            "seconds_busy": median(busy for _, busy in runs),
            "kept": median(alone for alone, _ in runs) / median(busy for _, busy in runs),
        }
        for name, runs in found.items()
    ]


def tables(rows: Sequence[dict[str, Any]], busy: Sequence[dict[str, Any]], peaks: dict[str, int]) -> Iterator[str]:
    """The figures as lines of text."""
    if rows:
        first = rows[0]["program"]
        yield f"{'phase':8} {'batch':>5} {'program':22} {'tokens/s':>9} {'quartiles':>19} {first + ' is':>12}"
    for row in rows:
        low, high = row["tokens_per_s_iqr"]
        spread = f"{low:.1f} - {high:.1f}"
        yield (
            f"{row['phase']:8} {row['batch']:5} {row['program']:22} {row['tokens_per_s']:9.1f} {spread:>19} "
            f"{row['ratio']:10.2f} x"
        )
    for row in busy:
        yield f"beside a busy core {row['program']:22} keeps {row['kept']:6.1%} of its idle decoding speed"
    for name, peak in peaks.items():
        yield f"peak memory {name:22} {peak / 1e9:.2f} GB"


def show(line: str) -> None:
    """Tell on stderr, where that is a terminal, what is being timed: over the last such line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
