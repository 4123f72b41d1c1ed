"""Which producer output an input column reads, and values shared among the columns of one output."""

from __future__ import annotations

import torch

from compress.transform import head_sources, tie


def test_each_head_feeds_its_repeats() -> None:
    # Two heads of three outputs, each read by two query heads: head 0 by columns 0-2 and 3-5, head 1 by 6-8 and 9-11.
    assert head_sources(12, repeat=2, head_size=3).tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]
    assert head_sources(4, repeat=1, head_size=1).tolist() == [0, 1, 2, 3]


def test_tied_values_are_means() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert tie(values, torch.tensor([0, 1, 0, 1])).tolist() == [2.0, 4.0, 2.0, 4.0]
    assert tie(values, None) is values
