"""A model as transformers knows it from config.json alone: its network on the meta device, and its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from compress.errors import InputError

# Memory for the keys and values of sequences that a model writes side by side.
SAMPLING_CACHE_BYTES = 512 << 20


@dataclass(frozen=True)
class Dimensions:
    """The sizes of a model that a plan or a report asks for, whatever its architecture."""

    family: str
    vocab_size: int
    hidden_size: int
    layer_count: int
    kv_heads: int
    head_dim: int
    context_length: int


class CacheSizes(Protocol):
    """The sizes of a model that its key-value cache follows from."""

    @property
    def layer_count(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


def empty_model(folder: Path) -> Any:
    """The causal language model of transformers that config.json in `folder` describes; no code of the folder runs.

    Its parameters are on the meta device, tied ones are one; its computed tables are real. A quantization_config is
    left out. Raises InputError for an architecture that transformers does not know and for values that cannot be.
    """
    from accelerate import init_empty_weights
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    # Values of the wrong kind surface wherever an architecture first computes with them.
    wrong_kinds = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RuntimeError, AssertionError)
    bad_values = (*wrong_kinds, StrictDataclassError)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, *bad_values) as error:
        file, reason = folder / "config.json", one_line(error)
        mend = "mend that field, or copy the model's own config.json again"
        raise InputError(f"{file}: no causal language model can be built from it: {reason}: {mend}") from None
    model.tie_weights()
    return model.eval()


def one_line(error: Exception) -> str:
    """What an exception says, up to its first blank line, in one line; its class's name where it says nothing."""
    return " ".join(str(error).strip().partition("\n\n")[0].split()) or type(error).__name__


def dimensions(config: Any) -> Dimensions:
    """The sizes in a config of transformers."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    return Dimensions(
        family=config.model_type,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        layer_count=text.num_hidden_layers,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        context_length=getattr(text, "max_position_embeddings", None) or 2048,
    )


# Types that keys and values can be kept in: bytes of a number, and of the step that a token's numbers of a head share.
CACHE_BYTES = {"f32": (4, 0), "bf16": (2, 0), "int8": (1, 4)}


def kv_bytes_per_token(sizes: CacheSizes, itemsize: int, step_bytes: int = 0) -> int:
    """Bytes of key and value cache per token: 2 x layers x kv heads x (head size x bytes per value + of a step)."""
    return 2 * sizes.layer_count * sizes.kv_heads * (sizes.head_dim * itemsize + step_bytes)
