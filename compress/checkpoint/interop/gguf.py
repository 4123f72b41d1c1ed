"""A checkpoint as one GGUF file for llama.cpp, its integers carried over as they are where GGUF has words for them.

Q4_0 holds a symmetric 4-bit code and a float16 scale per 32 weights, so a W4A16 layer whose groups are multiples of 32
fits in unchanged; Q8_0 does the same for W8A16 and W8A8. Everything else is rounded, and the record says what.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint.agreement import refuse_extra, refuse_missing, refuse_shape, strangers
from compress.checkpoint.interop import blocks
from compress.checkpoint.interop.exported import FLOATS, Exported, Progress, Record, in_words, type_name, unwatched
from compress.checkpoint.interop.folder import stored_parts
from compress.checkpoint.interop.gguf_architecture import (
    EMBEDDING,
    HEAD,
    Architecture,
    DecoderShape,
    Piece,
    architecture_of,
    head_piece,
    metadata,
    paired_rows,
    pieces,
    rope_factors,
)
from compress.checkpoint.interop.gguf_file import TYPES, Planned, string, uint32, write
from compress.checkpoint.interop.gguf_vocabulary import read_vocabulary
from compress.checkpoint.reader import CONFIG, Checkpoint
from compress.checkpoint.source import Source, dequantized
from compress.errors import USAGE, InputError, did_you_mean
from compress.formats import format_named
from compress.formats.scheme import Scheme

NAME = "gguf"
AUTO = "auto"
KINDS = (AUTO, *TYPES)
FILE = "model.gguf"
# general.file_type: llama.cpp's number for files whose matrices are mostly of a type.
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}
# Weights that are converted at once: 16 MB in float32.
CHUNK = 1 << 22


@dataclass(frozen=True)
class Options:
    """kind: of the linear layers, from KINDS; "auto" stores each as it is, and refuses one that GGUF cannot hold so.
    embeddings: of embedding and head, "auto" for Q8_0 beside integers and else as stored. replace: as for `write`."""

    kind: str = AUTO
    embeddings: str = AUTO
    replace: bool = False


@dataclass(frozen=True)
class Job:
    """A checkpoint on its way: as it lies there, as floats, and what is noted while it is written."""

    checkpoint: Checkpoint
    schemes: dict[str, Scheme]
    floats: Source
    options: Options
    record: Record


def export(
    checkpoint: Checkpoint,
    schemes: dict[str, Scheme],
    shape: DecoderShape,
    output: Path,
    options: Options,
    progress: Progress = unwatched,
) -> Exported:
    """Write `checkpoint`, whose modules are stored under `schemes`, to `output`: a file if it ends in .gguf, else a
    folder that gets one. Holds one tensor at a time.

    Raises InputError for an architecture, tokenizer or tensor that GGUF or llama.cpp cannot take, and for bad output.
    """
    for option, kind in (("--type", options.kind), ("--embeddings", options.embeddings)):
        if kind not in KINDS:
            known = ", ".join(KINDS)
            raise InputError(f"{option}: {kind!r} is not known{did_you_mean(kind, KINDS)} Known: {known}", USAGE)
    output = output if output.suffix == ".gguf" else output / FILE
    architecture = architecture_of(shape, checkpoint.folder / CONFIG)
    floats: Source = dequantized(checkpoint, schemes, torch.float32) if schemes else checkpoint
    job = Job(checkpoint, schemes, floats, options, Record())
    wanted = _pieces(job, shape, architecture)
    told, notes = metadata(shape, architecture)
    vocabulary = read_vocabulary(checkpoint.folder, checkpoint.config, shape.vocab_size)
    linear = {piece.source: _kind(job, piece) for piece in wanted if _is_linear(piece)}
    tensors = [_planned(job, piece, linear) for piece in wanted]
    if shape.ropes[0].kind == "llama3":
        factors = rope_factors(shape.ropes[0], shape.head_dim)
        tensors.append(Planned("rope_freqs.weight", "F32", tuple(factors.shape), lambda: [factors.view(torch.uint8)]))
    kinds = list(linear.values())
    general = {
        "general.architecture": string(architecture.name),
        "general.type": string("model"),
        "general.name": string(str(checkpoint.config.get("_name_or_path") or checkpoint.folder.resolve().name)),
        "general.quantized_by": string(f"lmpress {version('lmpress')}"),
        "general.quantization_version": uint32(2),
        "general.file_type": uint32(FILE_TYPES[max(set(kinds), key=kinds.count)]),
    }
    nbytes = write(output, {**general, **told, **vocabulary.metadata}, tensors, options.replace, progress)
    job.record.types.update(tensor.kind for tensor in tensors)
    cut = f"llama.cpp cuts text with its tokenizer {vocabulary.name!r}"
    return Exported(output, NAME, nbytes, job.record, (cut, *notes, *vocabulary.notes))


def _pieces(job: Job, shape: DecoderShape, architecture: Architecture) -> list[Piece]:
    """The tensors to write, each held against the shape it must have. Raises InputError for one too many or too few."""
    held = job.floats.tensors
    wanted = list(pieces(shape, architecture))
    if HEAD in held or not shape.tied:
        wanted.append(head_piece(shape))
    names = {piece.source for piece in wanted}
    refuse_missing(job.checkpoint.folder, [name for name in names if name not in held])
    refuse_extra(job.checkpoint.folder, strangers(held, names)[0])
    for piece in wanted:
        refuse_shape(held[piece.source], piece.shape)
    if shape.tied and HEAD in held and torch.equal(job.floats.read(HEAD), job.floats.read(EMBEDDING)):
        wanted.pop()
    return wanted


def _is_linear(piece: Piece) -> bool:
    """Whether a tensor is the weight of a projection inside a block."""
    return len(piece.shape) == 2 and piece.source not in (EMBEDDING, HEAD)


def _kind(job: Job, piece: Piece) -> str:
    """The type that a weight matrix is stored as by `options.kind`. Raises InputError where there is none."""
    scheme, kind = job.schemes.get(piece.module), job.options.kind
    if kind != AUTO:
        return kind
    if scheme is None:
        stored = type_name(job.checkpoint.tensors[piece.source].dtype)
        return stored if stored in TYPES else "F32"
    for kind in blocks.BITS:
        if _carries(scheme, piece, kind):
            return kind
    raise InputError(
        f"{job.checkpoint.folder}: {piece.module} is {in_words(scheme)}, which no GGUF type holds as it is: give "
        "--type Q8_0 or --type Q4_0 to round it"
    )


def _carries(scheme: Scheme, piece: Piece, kind: str) -> bool:
    grid = scheme.grid
    plain = grid.symmetric and scheme.threshold is None
    return blocks.carries(kind, grid.bits, piece.shape[1] // grid.groups(piece.shape[1]), plain)


def _planned(job: Job, piece: Piece, linear: dict[str, str]) -> Planned:
    """How `piece` is written. Vectors are F32; `linear` has the types of the projections."""
    if len(piece.shape) == 1:
        kind = "F32"
    elif piece.source in linear:
        kind = linear[piece.source]
    elif piece.module in job.schemes or job.options.embeddings == AUTO and not set(linear.values()) & set(blocks.BITS):
        kind = _kind(job, piece)
    else:
        kind = "Q8_0" if job.options.embeddings == AUTO else job.options.embeddings
    block = TYPES[kind][1]
    if piece.shape[-1] % block:
        raise InputError(
            f"{job.checkpoint.folder}: {piece.source} has {piece.shape[-1]} columns, not a multiple of the {block} in "
            f"a block of {kind}: give --type F16 and --embeddings F16"
        )
    return Planned(piece.target, kind, piece.shape, lambda: _bytes(job, piece, kind))


def _bytes(job: Job, piece: Piece, kind: str) -> Iterator[Tensor]:
    """The data of `piece` as uint8 tensors of whole rows. Raises InputError for values that `kind` cannot hold."""
    scheme = job.schemes.get(piece.module) if len(piece.shape) == 2 else None
    order = None if piece.heads is None else paired_rows(piece.shape[0], piece.heads)
    try:
        if scheme is not None and _carries(scheme, piece, kind):
            yield _carried(job, piece, scheme, kind, order)
            return
        info = job.floats.tensors[piece.source]
        source = type_name(info.dtype) if scheme is None else in_words(scheme)
        if source != kind and (source == "F64" or kind != "F32"):
            job.record.note_rounding(piece.source, source, kind)
        for rows in _rows(job, piece, order, packed=scheme is not None):
            yield _converted(rows, kind).view(torch.uint8)
    except ValueError as error:
        raise InputError(
            f"{job.checkpoint.folder}: tensor {piece.source!r} {error}: give --type F32 or BF16"
        ) from error


def _carried(job: Job, piece: Piece, scheme: Scheme, kind: str, order: Tensor | None) -> Tensor:
    quantized = format_named(scheme.format).unpack(stored_parts(job.checkpoint, piece.module), scheme.grid)
    data, scale = blocks.carry(kind, quantized)
    job.record.carried += 1
    job.record.note_scales(quantized.scale, scale)
    return data if order is None else data[order]


def _rows(job: Job, piece: Piece, order: Tensor | None, packed: bool) -> Iterator[Tensor]:
    """The float tensor in runs of rows; read as a whole where its rows change places or have to be unpacked."""
    step = max(1, CHUNK // (piece.shape[1] if len(piece.shape) == 2 else 1))
    if order is None and not packed:
        for start in range(0, piece.shape[0], step):
            yield job.floats.read_rows(piece.source, start, min(start + step, piece.shape[0]))
        return
    whole = job.floats.read(piece.source)
    yield from (whole if order is None else whole[order]).split(step)


def _converted(rows: Tensor, kind: str) -> Tensor:
    if kind in blocks.BITS:
        return blocks.round_to(kind, rows.float())
    converted = rows.to(FLOATS[kind])
    if not bool(torch.isfinite(converted).all()):
        raise ValueError(f"holds NaN, infinity or a value beyond the range of {kind}")
    return converted
