"""Several processes that run one command together, as `accelerate launch` starts them; alone, nothing is needed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

# While the first process compresses a model, the others wait for it.
PATIENCE = timedelta(days=7)


def is_main() -> bool:
    """Whether this process is the one that writes and reports."""
    state = _state()
    return state is None or bool(state.is_main_process)


@contextmanager
def main_first() -> Iterator[None]:
    """Let the main process go through the body before all others, which then find what it left on the disk."""
    state = _state()
    if state is None:
        yield
    else:
        with state.main_process_first():
            yield


def _state() -> Any | None:
    """What accelerate knows of the processes; None where this one is alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    return PartialState(cpu=on_cpu, timeout=PATIENCE)
