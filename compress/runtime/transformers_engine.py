"""The engine for architectures that the decoder does not know: transformers' model, with packed linear layers in it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.architecture import Dimensions, dimensions, empty_model, one_line
from compress.checkpoint import Checkpoint
from compress.errors import InputError
from compress.runtime.assign import Target, assign, schemes_of


class TransformersNetwork(nn.Module):
    """A causal language model of transformers, its forward pass cut in two where the decoder hands over to the head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.decoder = model.get_decoder()
        # transformers 5.2x renames the argument that carries the cache.
        names = inspect.signature(inspect.unwrap(type(self.decoder).forward)).parameters
        self.cache_argument = "past_key_values" if "past_key_values" in names else "cache"
        with torch.inference_mode():
            probe = self.decoder(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
        self.output_type = type(probe)

    def hidden(self, tokens: Tensor, cache: Any = None) -> Tensor:
        arguments = {self.cache_argument: cache, "use_cache": cache is not None}
        return self.decoder(input_ids=tokens, **arguments).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """The head's logits, with whatever scaling or capping the architecture's own forward pass adds."""
        flat = hidden.reshape(1, -1, hidden.shape[-1])
        self.decoder.forward = lambda *_, **__: self.output_type(last_hidden_state=flat)
        try:
            logits = self.model(input_ids=flat.new_zeros(1, flat.shape[1], dtype=torch.long), use_cache=False).logits
        finally:
            del self.decoder.forward
        return logits.view(*hidden.shape[:-1], logits.shape[-1])

    def new_cache(self, batch: int, capacity: int) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)


def build(checkpoint: Checkpoint, target: Target) -> tuple[TransformersNetwork, Dimensions]:
    """transformers' model for `checkpoint`. Packed weights stay packed.

    Raises InputError for an architecture that transformers does not know either.
    """
    if checkpoint.quantization is None:
        model = _load(checkpoint.folder, target.dtype).to(target.device)
    else:
        model = _empty(checkpoint.folder)
        try:
            assign(model, checkpoint, schemes_of(checkpoint, model), target)
        except InputError as error:
            hint = "or export it as 'dense', since transformers regroups some architectures' tensors as it loads them"
            raise InputError(f"{error}, {hint}") from None
        for name, buffer in model.named_buffers():
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, buffer.to(target.device))
    return TransformersNetwork(model.eval()), dimensions(model.config)


def _load(folder: Path, dtype: torch.dtype) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoModelForCausalLM

    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except (ValueError, KeyError, OSError, RuntimeError, StrictDataclassError) as error:
        raise _refused(folder, one_line(error)) from None
    if loaded["missing_keys"]:
        name = sorted(loaded["missing_keys"])[0]
        raise InputError(f"{folder}: tensor {name!r} is missing: copy or export the folder again")
    return model


def _empty(folder: Path) -> Any:
    try:
        return empty_model(folder)
    except InputError as error:
        raise _refused(folder, str(error)) from None


def _refused(folder: Path, reason: str) -> InputError:
    return InputError(f"{folder}: neither the bundled decoder nor transformers can load it: {reason}")
