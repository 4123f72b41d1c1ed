"""Which kernel runs which format where."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compress.errors import InputError
from compress.formats.scheme import SCHEMES, pruned, scheme_named
from compress.formats.sparse24 import PATTERN
from compress.kernels.pick import KERNELS, cpu_kernel, expected, pick


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_has_a_kernel_everywhere(name: str, device: torch.device) -> None:
    assert pick(SCHEMES[name], device).NAME == "reference"
    assert pick(SCHEMES[name], device.type).NAME == "reference"


@pytest.mark.parametrize("name", SCHEMES)
def test_the_plan_names_the_kernel_that_will_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert expected(SCHEMES[name], "cpu") == pick(SCHEMES[name], "cpu", (cpu_kernel(1), *KERNELS)).NAME
    monkeypatch.setenv("LMPRESS_CPU_VARIANT", "none")
    assert expected(SCHEMES[name], "cpu") == "reference"


def test_the_plan_knows_which_groups_the_kernel_takes() -> None:
    for odd in (scheme_named("W4A16", 12), pruned(scheme_named("W4A16", 16), PATTERN)):
        assert expected(odd, "cpu") == pick(odd, "cpu", (cpu_kernel(1), *KERNELS)).NAME == "reference"


def test_a_format_without_a_kernel_is_refused_with_reasons() -> None:
    strange = replace(SCHEMES["W4A16"], format="sparse48")
    with pytest.raises(InputError, match="'sparse48' has no kernel on cpu .reference: unknown format.: export it"):
        pick(strange, "cpu")
