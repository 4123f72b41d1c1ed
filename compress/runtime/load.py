"""Load a checkpoint folder into a model that runs: the decoder where it knows the family, transformers otherwise."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from compress.architecture import Dimensions
from compress.checkpoint import Checkpoint, manifest, open_checkpoint
from compress.errors import InputError
from compress.runtime import transformers_engine
from compress.runtime.assign import PackedLinear, assign, schemes_of
from compress.runtime.config import ModelConfig, Unsupported, read_config
from compress.runtime.decoder import Decoder

logger = logging.getLogger(__name__)


class Network(Protocol):
    """What an engine builds, whichever it is."""

    def hidden(self, tokens: Tensor, cache: Any = None) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def new_cache(self, batch: int, capacity: int) -> Any: ...


@dataclass(frozen=True)
class Model:
    """A loaded model. `engine` is "lmpress" or "transformers"; `notes` say what a report must not leave out.

    kernels: the kernel that multiplies each packed linear layer, by module name.
    """

    folder: Path
    config: ModelConfig | Dimensions
    engine: str
    network: Network
    device: torch.device
    notes: list[str] = field(default_factory=list)

    @property
    def kernels(self) -> dict[str, str]:
        return {name: linear.kernel.NAME for name, linear in self._packed().items()}

    @torch.inference_mode()
    def hidden(self, tokens: Tensor, cache: Any = None) -> Tensor:
        """Hidden states [B, T, D] after the last norm for tokens [B, T], which continue `cache` and extend it.

        Raises InputError for an id that the embedding has no row for.
        """
        tokens = tokens.to(self.device)
        if tokens.numel():
            lowest, highest = (int(bound) for bound in torch.aminmax(tokens))
            if lowest < 0 or highest >= self.config.vocab_size:
                raise InputError(
                    f"{self.folder}: token id {lowest if lowest < 0 else highest} is beyond the embedding, which has "
                    f"{self.config.vocab_size} rows: use the tokenizer that belongs to this checkpoint"
                )
        return self.network.hidden(tokens, cache)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] of hidden states [..., D]: a vocabulary wide, so ask for a few rows at a time."""
        return self.network.logits(hidden)

    def new_cache(self, batch: int, capacity: int) -> Any:
        """An empty key and value cache for `batch` sequences of at most `capacity` tokens."""
        return self.network.new_cache(batch, capacity)

    def outlier_misses(self) -> dict[str, tuple[int, int]]:
        """Per layer with outlier columns: activations over the threshold outside them, and activations seen so far."""
        counts = {name: linear.kernel.outlier_counts(linear.prepared) for name, linear in self._packed().items()}
        return {name: count for name, count in counts.items() if count is not None}

    def _packed(self) -> dict[str, PackedLinear]:
        assert isinstance(self.network, nn.Module)
        return {name: module for name, module in self.network.named_modules() if isinstance(module, PackedLinear)}


def known_config(checkpoint: Checkpoint) -> ModelConfig | Unsupported:
    """What the decoder needs to know of the model, or why it cannot run it."""
    try:
        return read_config(checkpoint.config, checkpoint.folder / "config.json")
    except Unsupported as reason:
        return reason


def load_model(
    folder: Path | Checkpoint, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Model:
    """Load the checkpoint in `folder` (or opened already), quantized or not, to compute in `dtype` on `device`.

    Packed weights stay packed. Raises InputError for a checkpoint that is damaged, not understood or not complete.
    """
    checkpoint = folder if isinstance(folder, Checkpoint) else open_checkpoint(Path(folder))
    if (checkpoint.folder / manifest.NAME).exists():
        manifest.check(manifest.read(checkpoint.folder), checkpoint)
    device = torch.device(device)
    config = known_config(checkpoint)
    if isinstance(config, Unsupported):
        note = f"runs through transformers, not the bundled decoder: {config}"
        logger.warning("%s: %s", checkpoint.folder, note)
        network, dimensions = transformers_engine.build(checkpoint, device, dtype)
        return Model(checkpoint.folder, dimensions, "transformers", network, device, [note])
    with torch.device("meta"):
        decoder = Decoder(config)
    assign(decoder, checkpoint, schemes_of(checkpoint, decoder), device, dtype)
    return Model(checkpoint.folder, config, "lmpress", decoder.eval(), device)
