"""tokenizer.json as GGUF metadata, for tokenizers that llama.cpp repeats exactly; the others are refused by reason.

Two kinds: byte-level BPE ("gpt2" there, with the name of a built-in pre-tokenizer), and BPE over characters with byte
fallback, which SentencePiece trains ("llama"). What tokenizer.json does decides, not what the model is called.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.checkpoint.interop.gguf_file import boolean, float32s, int32s, string, strings, uint32
from compress.checkpoint.strict_json import read_object
from compress.errors import InputError

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"  # what SentencePiece writes for a space

_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
# How text is cut before merging, and whether a piece that is a token is taken whole -> llama.cpp's name for both.
PRE_TOKENIZERS = {
    (("words",), False): "gpt-2",
    (("digits", "words"), False): "smollm",
    ((f"{_WORD}|\\p{{N}}{{1,3}}|{_REST}", "bytes"), True): "llama-bpe",
    ((f"{_WORD}|\\p{{N}}|{_REST}", "bytes"), False): "qwen2",
}
# GGUF's word for a special token -> the word for it in tokenizer_config.json and config.json.
SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}


@dataclass(frozen=True)
class Vocabulary:
    """The `tokenizer.*` metadata; `name` is llama.cpp's for how text is cut."""

    metadata: dict[str, bytes]
    name: str
    notes: tuple[str, ...] = ()


def read_vocabulary(folder: Path, config: Mapping[str, Any], rows: int) -> Vocabulary:
    """The vocabulary of the checkpoint in `folder`, whose embedding has so many rows.

    Raises InputError for a tokenizer that is missing, does not fit the embedding, or that llama.cpp does not repeat.
    """
    file = folder / TOKENIZER
    if not file.exists():
        raise InputError(f"{file}: is missing, and a GGUF file holds the tokenizer: copy the model's own there")
    tokenizer = read_object(file)
    settings = read_object(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise _refused(file, f"its model is {_kind(model)}, not BPE")
    tokens, types = _tokens(file, tokenizer, rows)
    special = _special_ids(settings, config, tokens)
    if "eos" not in special:
        raise InputError(f"{folder / SETTINGS}: names no 'eos_token', and llama.cpp would take token 11: add it")
    merges = [tuple(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model.get("merges") or []]
    notes: tuple[str, ...] = ()
    if model.get("byte_fallback"):
        name, metadata = "llama", _sentencepiece(file, tokenizer, tokens, types, merges)
    else:
        name, metadata = _byte_level(file, tokenizer, merges)
        if tokenizer.get("normalizer") is not None:
            notes = ("the tokenizer brings text into Unicode's form NFC, which llama.cpp leaves to its caller",)
    metadata["tokenizer.ggml.tokens"] = strings(tokens)
    metadata["tokenizer.ggml.token_type"] = int32s(types)
    metadata |= {f"tokenizer.ggml.{word}_token_id": uint32(number) for word, number in special.items()}
    for word, adds in _added_around(file, tokenizer, special, tokens).items():
        metadata[f"tokenizer.ggml.add_{word}_token"] = boolean(adds)
    template = _chat_template(folder, settings)
    if template:
        metadata["tokenizer.chat_template"] = string(template)
    return Vocabulary(metadata, name, notes)


def _tokens(file: Path, tokenizer: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """The text and type of each row. Rows that no token stands for, as padded embeddings have, get a name of their own.

    Raises InputError for a token without a row and for a text that two tokens share.
    """
    named: dict[int, str] = {number: text for text, number in tokenizer["model"]["vocab"].items()}
    types = dict.fromkeys(named, NORMAL)
    for entry in tokenizer.get("added_tokens") or []:
        named[entry["id"]] = entry["content"]
        types[entry["id"]] = CONTROL if entry.get("special") else USER_DEFINED
    if max(named) >= rows:
        raise InputError(
            f"{file}: token {max(named)} is beyond the {rows} rows of the embedding: put the right one there"
        )
    tokens = [named.get(number, f"[PAD{number}]") for number in range(rows)]
    if len(set(tokens)) < rows:
        raise _refused(file, "two tokens have the same text")
    return tokens, [types.get(number, UNUSED) for number in range(rows)]


def _special_ids(settings: Mapping[str, Any], config: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, int]:
    """The special tokens' ids: of the texts in tokenizer_config.json, else as config.json says."""
    ids = {text: number for number, text in enumerate(tokens)}
    found: dict[str, int] = {}
    for word, name in SPECIAL.items():
        text = settings.get(f"{name}_token")
        text = text.get("content") if isinstance(text, dict) else text
        number = ids.get(text) if isinstance(text, str) else config.get(f"{name}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and 0 <= number < len(tokens):
            found[word] = number
    return found


def _byte_level(file: Path, tokenizer: dict[str, Any], merges: list[tuple[str, ...]]) -> tuple[str, dict[str, bytes]]:
    """llama.cpp's name for the pre-tokenizer, and the metadata of a byte-level BPE."""
    model = tokenizer["model"]
    for field in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(field):
            raise _refused(file, f"model.{field} is {model[field]!r}")
    if _kind(tokenizer.get("normalizer")) not in ("none", "NFC"):
        raise _refused(file, f"its normalizer is {_kind(tokenizer['normalizer'])}")
    steps = tuple(_step(file, step) for step in _sequence(tokenizer.get("pre_tokenizer"), "pretokenizers"))
    name = PRE_TOKENIZERS.get((steps, bool(model.get("ignore_merges"))))
    if name is None:
        known = ", ".join(PRE_TOKENIZERS.values())
        raise _refused(file, f"its pre-tokenizer is none of those known here ({known})")
    return name, {
        "tokenizer.ggml.model": string("gpt2"),
        "tokenizer.ggml.pre": string(name),
        "tokenizer.ggml.merges": strings([" ".join(merge) for merge in merges]),
        "tokenizer.ggml.add_space_prefix": boolean(False),
    }


def _step(file: Path, step: Mapping[str, Any]) -> str:
    """One step of a pre-tokenizer: "words" (GPT-2's pattern), "bytes", "digits" (one by one), or a pattern."""
    kind = step.get("type")
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return "words" if step.get("use_regex", True) else "bytes"
    if kind == "Digits" and step.get("individual_digits"):
        return "digits"
    pattern = step.get("pattern")
    if kind == "Split" and isinstance(pattern, dict) and step.get("behavior") == "Isolated" and not step.get("invert"):
        return str(pattern.get("Regex"))
    raise _refused(file, f"its pre-tokenizer has the step {json.dumps(step)}")


def _sentencepiece(
    file: Path, tokenizer: dict[str, Any], tokens: list[str], types: list[int], merges: list[tuple[str, ...]]
) -> dict[str, bytes]:
    """The metadata of a BPE with byte fallback; marks unknown and byte tokens in `types`.

    llama.cpp merges by the score of what a merge makes, where tokenizer.json lists the pairs that merge. Both do the
    same if scores fall in the order of the list and every pair that would make a token is listed; that is checked.
    """
    steps = [json.dumps(step, sort_keys=True) for step in _sequence(tokenizer.get("normalizer"), "normalizers")]
    spaces = json.dumps({"type": "Replace", "pattern": {"String": " "}, "content": SPACE}, sort_keys=True)
    prefix = json.dumps({"type": "Prepend", "prepend": SPACE}, sort_keys=True)
    if steps not in ([prefix, spaces], [spaces]) or tokenizer.get("pre_tokenizer") is not None:
        raise _refused(file, "it has byte fallback, and cuts text otherwise than SentencePiece's Llama tokenizer")
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge), rank)
    listed, texts = set(merges), {text for text, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    for number, text in enumerate(tokens):
        if len(text) == 6 and text.startswith("<0x") and types[number] == NORMAL:
            types[number] = BYTE
        if types[number] != NORMAL:
            continue
        for cut in range(1, len(text)):
            pair = (text[:cut], text[cut:])
            if pair not in listed and pair[0] in texts and pair[1] in texts:
                raise _refused(file, f"it does not merge {pair[0]!r} and {pair[1]!r} into {text!r}")
    unknown = tokenizer["model"].get("unk_token")
    if unknown in tokens:
        types[tokens.index(unknown)] = UNKNOWN
    return {
        "tokenizer.ggml.model": string("llama"),
        "tokenizer.ggml.pre": string("default"),
        "tokenizer.ggml.scores": float32s([-float(ranks.get(text, 0)) for text in tokens]),
        "tokenizer.ggml.add_space_prefix": boolean(prefix in steps),
    }


def _added_around(
    file: Path, tokenizer: Mapping[str, Any], special: Mapping[str, int], tokens: Sequence[str]
) -> dict[str, bool]:
    """Whether the tokenizer puts the start token in front of text by itself, and the end token behind it."""
    steps = _sequence(tokenizer.get("post_processor"), "processors")
    templates = [step for step in steps if step.get("type") != "ByteLevel"]
    if any(step.get("type") != "TemplateProcessing" for step in templates) or len(templates) > 1:
        raise _refused(file, f"its post-processor is {_kind(tokenizer['post_processor'])}")
    parts = templates[0].get("single", []) if templates else [{"Sequence": {}}]
    order = [part["SpecialToken"]["id"] if "SpecialToken" in part else None for part in parts]
    place = order.index(None)
    around = {"bos": order[:place], "eos": order[place + 1 :]}
    for word, texts in around.items():
        if texts and (word not in special or texts != [tokens[special[word]]]):
            raise _refused(file, f"its post-processor adds {', '.join(map(repr, texts))}")
    return {word: bool(texts) for word, texts in around.items()}


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template, from its own file or from tokenizer_config.json; of several, the default one."""
    if (folder / TEMPLATE).exists():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next((one["template"] for one in template if one.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _sequence(step: Any, field: str) -> list[dict[str, Any]]:
    """The steps of a component of tokenizer.json: of a Sequence its members, of null none."""
    if step is None:
        return []
    return list(step[field]) if step.get("type") == "Sequence" else [step]


def _kind(component: Any) -> str:
    return "none" if component is None else str(component.get("type")) if isinstance(component, dict) else "unreadable"


def _refused(file: Path, reason: str) -> InputError:
    return InputError(f"{file}: cannot be put into a GGUF file: {reason}: llama.cpp would cut text otherwise")
