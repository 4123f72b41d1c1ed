"""The CPU kernel in every variant that this processor runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from compress.kernels.cpu import build
from compress.kernels.cpu.kernel import CpuKernel
from compress.kernels.cpu.library import Engine


@pytest.fixture(scope="module", params=build.supported())
def kernel(request: pytest.FixtureRequest) -> Iterator[CpuKernel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMPRESS_CPU_VARIANT", request.param)
        yield CpuKernel(Engine(2))
