"""Which kernel runs which format where."""

from __future__ import annotations

import pytest
import torch

from compress.errors import InputError
from compress.formats import FORMATS
from compress.kernels.pick import pick


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_a_kernel_everywhere(name: str, device: torch.device) -> None:
    assert pick(name, device).NAME == "reference"
    assert pick(name, device.type).NAME == "reference"


def test_a_format_without_a_kernel_is_refused_with_reasons() -> None:
    with pytest.raises(InputError, match="'sparse24' has no kernel on cpu .reference: unknown format.: export it"):
        pick("sparse24", "cpu")
