"""Without a compiler everything still works on torch operations, and one line says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compress.kernels.cpu import build
from compress.runtime.generate import Sampling, generate
from compress.runtime.load import Execution, load_model
from tests.eval.compressed import compress_folder
from tests.tiny import byte_tokenizer

MAIN = "import sys; from compress.cli.app import main; main(sys.argv[1:])"
REASON = f"no C++ compiler on the PATH: {build.MEND}: runs on torch operations, slower"


@pytest.mark.skipif(not build.supported(), reason="this processor runs none of the variants")
def test_generate_goes_on_with_torch_operations(tiny_llama: Path, tmp_path: Path) -> None:
    folder = compress_folder(tiny_llama, tmp_path / "packed", "W4A16", 32)
    prompt = byte_tokenizer()("a press").input_ids
    plain = load_model(folder, execution=Execution("reference"))
    wanted = byte_tokenizer().decode(list(generate(plain, prompt, 8, Sampling())))
    environment = {**os.environ, "PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment = {name: value for name, value in environment.items() if name not in ("CXX", build.CHOICE)}
    command = [sys.executable, "-c", MAIN, "generate", str(folder), "--prompt", "a press", "--max-new", "8", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["text"] == wanted and set(told["kernels"]) == {"reference"}
    assert [line for line in done.stderr.splitlines() if "torch" in line] == done.stderr.splitlines()
    assert done.stderr.count("\n") == 1 and REASON in done.stderr
