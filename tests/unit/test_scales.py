"""KV scales are read from SGLang's own attention layers."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from kvcanary_plugin.pool_patcher.scales import NONE, read_scales


def make_model(*scales, layers=3):
    """``scales``: layer, half, value, and whether only the tensor is there."""
    attention = [RadixAttention(2, 16, 0.25, 2, layer_id=layer) for layer in range(layers)]
    for layer, half, value, is_tensor in scales:
        setattr(attention[layer], f"{half}_scale", torch.nn.Parameter(torch.tensor(value), requires_grad=False))
        if not is_tensor:
            setattr(attention[layer], f"{half}_scale_float", value)
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ModuleList(attention))


def test_without_scales_there_are_none():
    assert read_scales(make_model()) == NONE
    assert read_scales(torch.nn.Linear(2, 2)) == NONE


@pytest.mark.parametrize("is_tensor", [True, False])
def test_every_scale_counts_and_where_it_belongs(is_tensor):
    base = [(layer, half, 0.5, is_tensor) for layer in range(3) for half in "kv"]
    same = read_scales(make_model(*base))
    assert same == read_scales(make_model(*reversed(base)))
    assert len(same) == 16
    others = {
        read_scales(make_model(*base[:place], (*base[place][:2], 0.25, is_tensor), *base[place + 1 :]))
        for place in range(6)
    }
    assert len(others | {same, NONE}) == 8


def test_a_scale_a_head_counts_as_well():
    first, second = (make_model((0, "k", value, True)) for value in ([0.5, 0.5], [0.5, 0.25]))
    assert read_scales(first) != read_scales(second)
