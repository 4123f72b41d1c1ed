"""`lmpress generate`: continue a prompt, shown as it is written."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from compress.cli.options import Device, Json, KernelChoice, Kernels, KvCache, Threads, emit

logger = logging.getLogger(__name__)

# Tokens of the prompt that are decoded along with the first new ones: spaces and joined letters depend on them.
OVERLAP = 5


class Precision(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


def generate(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="Folder of the checkpoint to run.")],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The text to continue.")],
    max_new: Annotated[int, typer.Option("--max-new", min=1, help="Write at most this many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; 1 samples as trained.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Sample from this many likeliest tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Sample from the likeliest that add up to this.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the tokenizer's chat template.")] = False,
    dtype: Annotated[Precision, typer.Option(help="Type to compute in.")] = Precision.float32,
    kv_cache: KvCache = None,
    threads: Threads = None,
    kernels: Kernels = KernelChoice.auto,
    trust_kernels: Annotated[
        bool, typer.Option("--trust-kernels", help="Run GPU kernels that came with the checkpoint.")
    ] = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Continue a prompt with a checkpoint, compressed or not."""
    import torch

    from compress.checkpoint.tokenizer import load_tokenizer
    from compress.pipeline import pick_device
    from compress.runtime import generate as generation
    from compress.runtime.load import Execution, load_model

    sampling = generation.Sampling(temperature, top_k, top_p, seed)
    tokenizer = load_tokenizer(checkpoint)
    ids = prompt_ids(tokenizer, prompt, chat)
    execution = Execution(kernels, kv_cache, threads, trust_kernels)
    model = load_model(checkpoint, pick_device(device), getattr(torch, dtype.value), execution)
    context = model.config.context_length
    if len(ids) + max_new > context:
        logger.warning("%d tokens may be reached, and the model was made for %d", len(ids) + max_new, context)
    started = time.perf_counter()
    new: list[int] = []
    tokens = generation.generate(model, ids, max_new, sampling, generation.stop_tokens(checkpoint))
    text = ""
    for piece in pieces(tokenizer, ids, _kept(tokens, new)):
        text += piece
        if not as_json:
            typer.echo(piece, nl=False)
    seconds = time.perf_counter() - started
    if as_json:
        emit(
            {
                "model": str(checkpoint),
                "engine": model.engine,
                "notes": model.notes,
                "fallbacks": model.fallbacks,
                "kernels": dict(Counter(model.kernels.values())),
                "prompt_tokens": len(ids),
                "new_tokens": len(new),
                "text": text,
                "seed": seed,
                "seconds": seconds,
            }
        )
        return
    typer.echo()
    typer.echo(f"{len(ids)} + {len(new)} tokens in {seconds:.1f} s", err=True)


def prompt_ids(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    """The prompt's token ids, inside the chat template's user turn if `chat`.

    Raises InputError for a chat with a tokenizer that has no template.
    """
    from compress.errors import USAGE, InputError

    if not chat:
        return tokenizer(prompt).input_ids
    if not tokenizer.chat_template:
        raise InputError("--chat: the tokenizer of this checkpoint has no chat template: leave --chat out", USAGE)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text, add_special_tokens=False).input_ids


def pieces(tokenizer: Any, prompt: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """The text of `tokens`, which follow `prompt`, in pieces as soon as they are whole.

    A letter may take several tokens; until the last of them is there it decodes to U+FFFD, and is held back.
    """

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    ids = prompt[-OVERLAP:]
    told = len(ids)
    for token in tokens:
        ids.append(token)
        before, now = decode(ids[:told]), decode(ids)
        if len(now) > len(before) and not now.endswith("\ufffd"):
            yield now[len(before) :]
            ids = ids[max(0, told - OVERLAP) :]
            told = len(ids)
    rest = decode(ids)[len(decode(ids[:told])) :]
    if rest:
        yield rest


def _kept(tokens: Iterator[int], kept: list[int]) -> Iterator[int]:
    """`tokens`, each noted in `kept` as it passes."""
    for token in tokens:
        kept.append(token)
        yield token
