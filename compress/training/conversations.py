"""Conversations: packed whole, and counted where the assistant speaks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress import texts
from compress.errors import InputError
from compress.training.sequences import pad_token, padded
from compress.training_settings import Data

Row = tuple[list[int], list[float]]  # tokens, and how much each of them counts
Span = tuple[int, int]


@dataclass(frozen=True)
class Conversation:
    """A conversation as the chat template writes it, and where in it the assistant speaks: [start, stop) characters.

    spans is None where that does not show.
    """

    text: str
    spans: list[Span] | None


def assistant_spans(messages: Sequence[Any], render: Callable[..., str]) -> Conversation:
    """`messages` as `render(messages, add_generation_prompt=...)` writes them, with the spans of the assistant's words.

    A span begins where the template would have the assistant begin and ends behind its message, the mark that ends a
    turn included: that is what a student has to write. Where the template has no generation prompt, the opening of the
    turn is part of the span. A beginning of the messages that is not written as the beginning of the whole is no guide:
    then, and where no message is the assistant's, spans is None.
    """
    whole = render(messages, add_generation_prompt=False)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = [render(messages[:number], add_generation_prompt=asks) for asks in (True, False)] if number else [""]
        start = next((len(text) for text in before if whole.startswith(text)), None)
        after = render(messages[: number + 1], add_generation_prompt=False)
        if start is None or not whole.startswith(after) or start >= len(after):
            return Conversation(whole, None)
        spans.append((start, len(after)))
    return Conversation(whole, spans or None)


@dataclass(frozen=True)
class Spanned:
    """In the place of a tokenizer for texts.read_documents: its chat template writes the spans beside the text."""

    tokenizer: Any

    @property
    def chat_template(self) -> Any:
        return getattr(self.tokenizer, "chat_template", None)

    def apply_chat_template(self, messages: Any, tokenize: bool) -> str:
        """JSON of [text, spans]."""

        def render(part: Sequence[Any], add_generation_prompt: bool) -> str:
            return str(
                self.tokenizer.apply_chat_template(part, tokenize=tokenize, add_generation_prompt=add_generation_prompt)
            )

        found = assistant_spans(messages, render)
        return json.dumps([found.text, found.spans])


def read_conversations(source: Path | str, tokenizer: Any) -> Iterator[Conversation]:
    """The conversations in `source`, one by one; a plain text is one in which no assistant speaks.

    Raises InputError as texts.read_documents does.
    """
    for document in texts.read_documents(source, Spanned(tokenizer)):
        text, spans = json.loads(document)
        yield Conversation(text, spans)


def counted(conversation: Conversation, tokenizer: Any) -> Row:
    """The conversation's tokens, and for each 1.0 where the assistant speaks, else 0.0; all 1.0 where spans is None.

    Where a span ends is found by encoding the text up to there: the tokens that this shares with those of the whole lie
    before it. That works with every tokenizer, and a token that reaches into a span is part of it.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    tokens = encode(conversation.text)
    if conversation.spans is None:
        return tokens, [1.0] * len(tokens)
    counts = [0.0] * len(tokens)
    for span in conversation.spans:
        start, stop = (_shared(encode(conversation.text[:end]), tokens) for end in span)
        counts[start:stop] = [1.0] * (stop - start)
    return tokens, counts


def _shared(first: list[int], second: list[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def packed(data: Data, source: Path | str, tokenizer: Any) -> tuple[Tensor, Tensor, list[str]]:
    """Ids and weights [N, T] of up to `data.sequences` rows of conversations, and what is to be noted.

    A row takes whole conversations until the next would not fit; one longer than a row is cut. `data.seed` chooses
    among the rows, of which READ_AHEAD times as many as asked for are made. Raises InputError where there is none.
    """
    enough = data.sequences * texts.READ_AHEAD
    rows: list[Row] = []
    seen = silent = cut = unheard = 0
    reading = ""
    for conversation in read_conversations(source, tokenizer):
        if len(rows) > enough:  # the last of them is not full yet
            rows = rows[:enough]
            reading = f"ended behind conversation {seen}, which is enough"
            break
        tokens, counts = counted(conversation, tokenizer)
        seen += 1
        silent += conversation.spans is None
        cut += len(tokens) > data.seqlen
        tokens, counts = tokens[: data.seqlen], counts[: data.seqlen]
        if not any(counts[1:]):
            unheard += 1
        elif rows and len(rows[-1][0]) + len(tokens) <= data.seqlen:
            rows[-1] = (rows[-1][0] + tokens, rows[-1][1] + counts)
        else:
            rows.append((tokens, counts))
    if not rows:
        raise InputError(f"{source}: the assistant says nothing within {data.seqlen} tokens: set data.seqlen to more")
    notes = {
        f"{silent} of {seen} conversations do not show which words are the assistant's: all of theirs count": silent,
        f"{cut} of {seen} conversations are longer than {data.seqlen} tokens and are cut": cut,
        f"{unheard} of {seen} conversations are left out: the assistant says nothing within their tokens": unheard,
        f"they make {len(rows)} sequences, not the {data.sequences} asked for": len(rows) < data.sequences,
        f"reading {reading}": bool(reading),
    }
    generator = torch.Generator().manual_seed(data.seed)
    chosen = torch.randperm(len(rows), generator=generator)[: data.sequences].sort().values
    ids, weights = padded([rows[row] for row in chosen.tolist()], pad_token(tokenizer))
    return ids, weights, [f"{source}: {note}" for note, holds in notes.items() if holds]
