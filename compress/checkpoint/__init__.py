"""Checkpoint folders: a lazy shard reader, a resumable streaming writer, the manifest, quantization_config."""

from __future__ import annotations

from compress.checkpoint.header import TensorInfo
from compress.checkpoint.layout import Section
from compress.checkpoint.output import refuse_overlap
from compress.checkpoint.reader import Checkpoint, open_checkpoint
from compress.checkpoint.writer import Writer

__all__ = ["Checkpoint", "Section", "TensorInfo", "Writer", "open_checkpoint", "refuse_overlap"]
