"""Without a compiler everything still works on torch operations, and one line says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compress.kernels import exported
from compress.kernels.build import host_library
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


@pytest.mark.skipif(not build.supported(), reason="this processor runs none of the variants")
def test_the_checkpoint_s_own_library_runs_where_it_is_trusted(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = compress_folder(tiny_llama, tmp_path / "packed", "W4A16", 32)
    variant, tokens = build.choose(), torch.arange(20)[None]
    exported.write(folder, [host_library(variant)], [exported.HOST])
    wanted = load_model(folder).hidden(tokens)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    untrusted = load_model(folder)
    assert set(untrusted.kernels.values()) == {"reference"}
    assert [told["name"] for told in untrusted.fallbacks] == ["native kernels"]
    trusted = load_model(folder, execution=Execution(trust_kernels=True))
    assert set(trusted.kernels.values()) == {f"cpu-{variant}"} and not trusted.fallbacks
    assert torch.equal(trusted.hidden(tokens), wanted)
    monkeypatch.setenv(build.CHOICE, "none")
    switched_off = load_model(folder, execution=Execution(trust_kernels=True))
    assert set(switched_off.kernels.values()) == {"reference"} and switched_off.fallbacks
