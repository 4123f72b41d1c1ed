"""Kernels: who multiplies. One reference in plain torch that is always right, and what is faster beside it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from compress.formats.scheme import Scheme


class Kernel(Protocol):
    """What a kernel module offers. What `prepare` returns is the kernel's own business; nobody else looks inside."""

    @property
    def NAME(self) -> str: ...

    def refuses(self, scheme: Scheme, device: torch.device) -> str | None: ...

    def prepare(self, tensors: dict[str, Tensor], scheme: Scheme, device: torch.device) -> Any: ...

    def matmul(self, x: Tensor, prepared: Any) -> Tensor: ...

    def outlier_counts(self, prepared: Any) -> tuple[int, int] | None: ...
