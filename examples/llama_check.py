"""Export a checkpoint to GGUF, load it in llama.cpp, and hold its perplexity and its tokens against ours.

    python examples/llama_check.py build/W4A16 --python /path/to/venv/bin/python

llama.cpp runs through llama-cpp-python in the interpreter that `--python` names, which needs nothing of lmpress. Both
sides see the same windows of the same tokens. Exit code 1 where perplexities differ by more than `--tolerance`, or
llama.cpp cuts the text into other tokens than the checkpoint's tokenizer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from compress.checkpoint import open_checkpoint
from compress.checkpoint.interop import gguf
from compress.checkpoint.quantization_config import stored_schemes
from compress.checkpoint.tokenizer import load_tokenizer
from compress.eval.perplexity import perplexity
from compress.eval.quality import window_nll
from compress.eval.text import Windows, cut_windows, read_text
from compress.runtime.config import ModelConfig
from compress.runtime.load import Execution, known_config, load_model

TEXT = Path("build/demo/model/texts/wiki.txt")
# Characters whose tokens are compared; llama.cpp's own pre-tokenizers are what this looks at.
CHARACTERS = 20_000

PEER = """
import json
import sys

import llama_cpp
import numpy

question = json.load(open(sys.argv[2]))
tokens = question["tokens"]
context, batch = len(tokens[0]), 512
model = llama_cpp.Llama(
    sys.argv[1], n_ctx=context, n_batch=batch, n_ubatch=batch, n_threads=question["threads"],
    n_threads_batch=question["threads"], logits_all=True, verbose=False,
)
nll = []
for window in tokens:
    model.reset()
    model.eval(window)
    logits = numpy.asarray(model.scores[: context - 1], dtype=numpy.float64)
    top = logits.max(axis=1, keepdims=True)
    totals = top[:, 0] + numpy.log(numpy.exp(logits - top).sum(axis=1))
    nll.append((totals - logits[numpy.arange(context - 1), window[1:]]).tolist())
answer = {
    "nll": nll,
    "ids": model.tokenize(question["text"].encode(), add_bos=False, special=False),
    "version": llama_cpp.__version__,
    "system": llama_cpp.llama_print_system_info().decode(),
}
json.dump(answer, open(sys.argv[3], "w"))
"""


def main() -> None:
    """Parse arguments, compare, print what was found, and leave with 1 where it does not agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, metavar="CKPT")
    parser.add_argument("--python", required=True, help="interpreter that can import llama_cpp")
    parser.add_argument("--text", type=Path, default=TEXT, help=f"held-out text; default: {TEXT}")
    parser.add_argument("--type", default=gguf.AUTO, help="as for `lmpress export`")
    parser.add_argument("--embeddings", default=gguf.AUTO, help="as for `lmpress export`")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048, help="held-out tokens")
    parser.add_argument("--tolerance", type=float, default=0.01, help="of the ratio of perplexities")
    parser.add_argument("--output", type=Path, help="keep the GGUF file here")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = compare(arguments, Path(work))
    agrees = found["tokens_agree"] and abs(found["ppl_ratio"] - 1) <= arguments.tolerance
    if arguments.json:
        print(json.dumps({**found, "agrees": agrees}, indent=2))
    else:
        for key, value in found.items():
            print(f"{key:18} {value}")
    if not agrees:
        sys.exit("llama.cpp does not agree: see above")


def compare(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Both perplexities and whether the tokens are the same."""
    tokenizer = load_tokenizer(arguments.checkpoint)
    windows = cut_windows([arguments.text], tokenizer, arguments.context, arguments.tokens)
    text = read_text(arguments.text)[:CHARACTERS]
    file = exported(arguments, work)
    theirs = asked(arguments.python, file, windows, text, work)
    ours = measured(arguments.checkpoint, windows)
    ppl, stderr = perplexity(ours)
    ppl_llama, _ = perplexity(torch.tensor(theirs["nll"], dtype=torch.float64))
    return {
        "ppl": ppl,
        "ppl_stderr": stderr,
        "ppl_llama": ppl_llama,
        "ppl_ratio": ppl_llama / ppl,
        "tokens": windows.predicted,
        "tokens_agree": theirs["ids"] == tokenizer(text, add_special_tokens=False).input_ids,
        "gguf_bytes": file.stat().st_size,
        "llama_cpp_python": theirs["version"],
        "llama_system": theirs["system"].strip(),
    }


def exported(arguments: argparse.Namespace, work: Path) -> Path:
    """The GGUF file of the checkpoint."""
    checkpoint = open_checkpoint(arguments.checkpoint)
    shape = known_config(checkpoint)
    if not isinstance(shape, ModelConfig):
        sys.exit(f"{arguments.checkpoint}: {shape}")
    options = gguf.Options(arguments.type, arguments.embeddings, replace=True)
    output = arguments.output or work / "model.gguf"
    done = gguf.export(checkpoint, stored_schemes(checkpoint), shape, output, options)
    print("\n".join(done.lines()), file=sys.stderr)
    return done.output


def asked(python: str, file: Path, windows: Windows, text: str, work: Path) -> dict[str, Any]:
    """What llama.cpp makes of the windows and of the text."""
    question, answer = work / "question.json", work / "answer.json"
    asks = {"tokens": windows.tokens.tolist(), "text": text, "threads": torch.get_num_threads()}
    question.write_text(json.dumps(asks))
    command = [python, "-c", PEER, str(file), str(question), str(answer)]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        sys.exit(f"{python}: llama.cpp failed with exit code {done.returncode}, see above")
    return json.loads(answer.read_text())


def measured(folder: Path, windows: Windows) -> torch.Tensor:
    """nll float64 [W, T - 1] of our runtime, by its reference kernels: exact arithmetic on the stored weights."""
    model = load_model(folder, execution=Execution(kernels="reference"))
    return torch.stack([window_nll(model, tokens) for tokens in windows.tokens])


if __name__ == "__main__":
    main()
