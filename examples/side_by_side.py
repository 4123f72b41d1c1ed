"""lmpress beside llm-compressor: same model, same calibration tokens, same held-out text, in turn, one table.

    python examples/side_by_side.py --model build/demo/model

Every row is a process of its own, so that wall time and peak memory are its own. The peer runs where it is importable:
in this environment, or in the one whose interpreter `--peer-python` names. Nothing is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from compress.checkpoint.tokenizer import load_tokenizer
from compress.eval.run import Request, evaluate
from compress.runtime.load import Execution
from compress.texts import encode_and_pack, read_documents

QUANTIZE = {"scheme": "W4A16", "group_size": 64}
METHODS: dict[str, list[dict[str, Any]]] = {
    "rtn min-max": [{"quantize": {"method": "rtn", "search": "minmax", **QUANTIZE}}],
    "rtn": [{"quantize": {"method": "rtn", **QUANTIZE}}],
    "gptq": [{"quantize": {"method": "gptq", **QUANTIZE}}],
    "awq + gptq": [{"transform": {"method": "awq"}}, {"quantize": {"method": "gptq", **QUANTIZE}}],
}

PEER = """
import sys
import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

model_folder, tokens, output = sys.argv[1:]
ids = load_file(tokens)["ids"]
weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
recipe = GPTQModifier(ignore=["lm_head"], config_groups={"group_0": {"targets": ["Linear"], "weights": weights}})
model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(model_folder)
dataset = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
oneshot(model=model, tokenizer=tokenizer, dataset=dataset, recipe=recipe, max_seq_length=ids.shape[1],
        num_calibration_samples=len(ids), shuffle_calibration_samples=False, output_dir=output)
"""


def main() -> None:
    """Parse arguments, run every method, print the table and, with --json, write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder from `lmpress demo-model`, or any other")
    parser.add_argument("--calibration", type=Path, help="default: MODEL/texts/web.txt")
    parser.add_argument("--text", type=Path, help="held-out text; default: MODEL/texts/wiki.txt")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096, help="held-out tokens")
    parser.add_argument("--methods", default=",".join([*METHODS, "self + gptq", "peer"]), help="comma-separated")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that can import llmcompressor")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        # All runs come before all measuring: a child's peak memory counts what its parent held when it was started.
        runs = [timed(name, arguments, Path(work)) for name in arguments.methods.split(",")]
        rows = [measured(found, arguments) for found in runs if found is not None]
    print(f"{'method':16} {'ppl':>8} {'KL mean':>8} {'KL p99':>8} {'top-1':>7} {'seconds':>8} {'peak GB':>8}")
    for found in rows:
        print(
            f"{found['method']:16} {found['ppl']:8.3f} {found['kl_mean']:8.4f} {found['kl_p99']:8.3f} "
            f"{found['top1_agreement']:7.1%} {found['seconds']:8.1f} {found['peak_bytes'] / 1e9:8.2f}"
        )
    if rows:
        print(f"baseline perplexity {rows[0]['ppl_baseline']:.3f}; {torch.get_num_threads()} threads")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def timed(name: str, arguments: argparse.Namespace, work: Path) -> dict[str, Any] | None:
    """Run one method; None for a peer that cannot be imported."""
    output = work / name.replace(" ", "-")
    if name == "peer":
        if subprocess.run([arguments.peer_python, "-c", "import llmcompressor"], capture_output=True).returncode:
            print(f"peer: {arguments.peer_python} cannot import llmcompressor, so it is left out", file=sys.stderr)
            return None
        command = [arguments.peer_python, "-c", PEER, str(arguments.model), str(tokens(arguments, work)), str(output)]
    else:
        file = output.with_suffix(".json")
        file.write_text(json.dumps(recipe(name, arguments, output)))
        command = [
            sys.executable,
            "-c",
            "from compress.cli.app import main; main()",
            "run",
            str(file),
            "--device",
            "cpu",
        ]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=sys.stderr)
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.monotonic() - began
    if status:
        sys.exit(f"{name}: failed, see above")
    method = "llm-compressor" if name == "peer" else name
    return {"method": method, "seconds": seconds, "peak_bytes": used.ru_maxrss * 1024, "output": str(output)}


def measured(found: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """What a run cost, and what its output lost against the model."""
    text = arguments.text or arguments.model / "texts" / "wiki.txt"
    output = Path(found.pop("output"))
    # Plain torch with exact activations, so that what is compared is the weights alone.
    how = Execution("reference")
    request = Request(
        output, baseline=arguments.model, texts=(text,), limit=arguments.tokens, seconds=0.1, execution=how
    )
    return found | evaluate(request)["quality"]


def recipe(name: str, arguments: argparse.Namespace, output: Path) -> dict[str, Any]:
    """The recipe of one of our rows. "self + gptq" calibrates on text that the model writes."""
    source = "self" if name.startswith("self") else str(arguments.calibration or arguments.model / "texts" / "web.txt")
    calibration = {"source": source, "samples": arguments.samples, "seqlen": arguments.seqlen}
    return {
        "version": 1,
        "model": str(arguments.model),
        "output": str(output),
        "calibration": calibration,
        "stages": METHODS[name.removeprefix("self + ")],
    }


def tokens(arguments: argparse.Namespace, work: Path) -> Path:
    """The very sequences that our recipes calibrate on, as a file for the peer."""
    source = arguments.calibration or arguments.model / "texts" / "web.txt"
    tokenizer = load_tokenizer(arguments.model)
    packed = encode_and_pack(read_documents(source), tokenizer, arguments.samples, arguments.seqlen, seed=0)
    file = work / "tokens.safetensors"
    save_file({"ids": packed.ids.contiguous()}, file)
    return file


if __name__ == "__main__":
    main()
