"""Small trained tokenizers, one for each way in which llama.cpp cuts text, as models of a family ship them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

TEXT = (
    "It's 2024, and the 1,234 presses' prices haven't fallen;\n\n  they'Ve  risen by 17%!\tNa\u00efve caf\u00e9s "
    "\u2026 12\u00bd \U0001f600 done\r\n"
)
SPECIAL = ("<unk>", "<s>", "</s>")
SPACE = "\u2581"
WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(*before: pre_tokenizers.PreTokenizer, words: bool, ignore_merges: bool = False) -> Tokenizer:
    """A byte-level BPE that cuts text by the steps `before`, and then by GPT-2's pattern if `words`."""
    tokenizer = Tokenizer(BPE(ignore_merges=ignore_merges))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, last]) if before else last
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(tokenizer, alphabet, 400)


def sentencepiece() -> Tokenizer:
    """A BPE with byte fallback, laid out as transformers does it for Llama 2, a start token in front of text."""
    tokenizer = Tokenizer(BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    steps = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence(steps)
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))])}
    pieces = [SPACE, *letters, "th", "the", f"{SPACE}the", "in", "ing", f"{SPACE}p", f"{SPACE}pr", "es", f"{SPACE}pres"]
    for piece in pieces:
        vocabulary[piece] = len(vocabulary)
    cuts = [(piece[:cut], piece[cut:]) for piece in pieces for cut in range(1, len(piece))]
    merges = [pair for pair in cuts if pair[0] in vocabulary and pair[1] in vocabulary]
    tokenizer.model = BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def trained(tokenizer: Tokenizer, alphabet: list[str], size: int) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def normalized(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: byte_level(words=True),
    "smollm": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), words=True),
    "llama-bpe": lambda: byte_level(split(f"{WORD}|\\p{{N}}{{1,3}}|{REST}"), words=False, ignore_merges=True),
    "qwen2": lambda: normalized(byte_level(split(f"{WORD}|\\p{{N}}|{REST}"), words=False)),
    "llama": sentencepiece,
}


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> Path:
    """tokenizer.json and a tokenizer_config.json in `folder`, which replace those that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "unk_token": "<unk>", '
        '"eos_token": {"__type": "AddedToken", "content": "</s>"}}'
    )
    return folder
