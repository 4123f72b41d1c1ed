"""Tokenizers: loaded from a checkpoint folder without touching the network, and the files that travel with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compress.checkpoint.strict_json import read_object
from compress.errors import InputError

# Patterns, because vocabularies are named after their model (qwen.tiktoken, spiece.model, tokenizer.model.v3).
VOCABULARIES = ("tokenizer.json", "*.model", "tokenizer.model.*", "*.tiktoken", "tekken.json", "vocab.*")
COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def tokenizer_files(folder: Path) -> list[Path]:
    """The files in `folder` to copy beside compressed weights, sorted: the tokenizer's, and generation_config.json.

    generation_config.json is among them because it names the tokens at which generation stops.
    """
    return sorted({file for pattern in (*VOCABULARIES, *COMPANIONS) for file in Path(folder).glob(pattern)})


def load_tokenizer(folder: Path) -> Any:
    """The transformers tokenizer in `folder`, from local files alone and without code from the folder.

    Raises InputError for a folder without a vocabulary or one that transformers cannot load.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder: give the folder of a checkpoint")
    if not any(file for pattern in VOCABULARIES for file in folder.glob(pattern)):
        raise InputError(f"{folder}: holds no tokenizer (tokenizer.json): copy the model's tokenizer files there")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).exists():
            read_object(folder / name)  # transformers reports broken JSON as a bare Exception
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{folder}: tokenizer cannot be loaded ({reason}): copy its files again") from error
