"""llama.cpp as a peer of examples/side_by_side_speed.py, through llama-cpp-python, in whatever environment has that.

Settings are llama.cpp's defaults but for the number of threads and a cache per sequence (`kv_unified` off), which is
what it advises for sequences that share no prefix.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
from serving import serve


class LlamaCpp:
    """A GGUF file in llama.cpp. Several sequences are decoded in one call, a token of each."""

    def __init__(self, file: Path, threads: int) -> None:
        # Its log is long and goes to stderr; the callback must live as long as the library may call it.
        self.silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"{file}: llama.cpp cannot load it")
        self.threads = threads
        self.context: Any = None
        self.shape = (0, 0)
        self.batch = llama_cpp.llama_batch_init(llama_cpp.llama_context_default_params().n_batch, 0, 1)
        description = ctypes.create_string_buffer(128)
        llama_cpp.llama_model_desc(self.model, description, len(description))
        self.about = {
            "program": "llama.cpp",
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "weights": f"{file.name}: {description.value.decode()}",
            "threads": threads,
        }

    def prepare(self, batch: int, capacity: int) -> None:
        """An empty cache: the context of the last request cleared, or another where it has not this shape."""
        if self.shape != (batch, capacity):
            if self.context is not None:
                llama_cpp.llama_free(self.context)
            settings = llama_cpp.llama_context_default_params()
            settings.n_ctx = batch * capacity
            settings.n_seq_max = batch
            settings.kv_unified = False
            settings.n_threads = settings.n_threads_batch = self.threads
            self.context = llama_cpp.llama_init_from_model(self.model, settings)
            if not self.context:
                raise SystemExit(f"llama.cpp has no room for {batch} sequences of {capacity} tokens")
            self.shape = (batch, capacity)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)
        self.length = 0

    def prefill(self, prompt: int) -> None:
        self._decode(
            [
                (position % 97, position, sequence, position == prompt - 1)
                for sequence in range(self.shape[0])
                for position in range(prompt)
            ]
        )
        self.length = prompt

    def step(self) -> None:
        self._decode([(0, self.length, sequence, True) for sequence in range(self.shape[0])])
        self.length += 1

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Run rows of (token, position, sequence, whether its logits are wanted), as many per call as fit into one."""
        room = llama_cpp.llama_n_batch(self.context)
        for start in range(0, len(rows), room):
            part = rows[start : start + room]
            for index, (token, position, sequence, wanted) in enumerate(part):
                self.batch.token[index] = token
                self.batch.pos[index] = position
                self.batch.n_seq_id[index] = 1
                self.batch.seq_id[index][0] = sequence
                self.batch.logits[index] = wanted
            self.batch.n_tokens = len(part)
            status = llama_cpp.llama_decode(self.context, self.batch)
            if status:
                raise SystemExit(f"llama_decode failed with {status}")
            if any(wanted for *_, wanted in part):
                llama_cpp.llama_get_logits(self.context)  # Waits until they are there.


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    serve(LlamaCpp(arguments.model, arguments.threads))
