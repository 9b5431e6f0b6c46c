"""Hybrid models: the state of a request must reach its next forward as the last one left it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import memory_pool as mp
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from kvcanary_plugin.config import Config
from kvcanary_plugin.pool_patcher.adapters import adapt_pool
from kvcanary_plugin.runtime.guard import Guard
from tests.engine import CONTEXT, WITHOUT_OWNERSHIP, Engine, ListReporter


class HybridEngine(Engine):
    """Attention in layers 1 and 3, a linear layer in 0 and 2, on SGLang's own pools."""

    def __init__(self, **options: Any) -> None:
        names = inspect.signature(mp.HybridReqToTokenPool.__init__).parameters
        given = {
            "size": 16,
            "mamba_size": 16,
            "mamba_spec_state_size": 16,
            "max_context_len": CONTEXT,
            "device": "cpu",
            "enable_memory_saver": False,
            "cache_params": SimpleNamespace(
                shape=SimpleNamespace(conv=[(6, 3)], temporal=(2, 4, 4)),
                dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32),
                layers=[0, 2],
                is_kda=False,
            ),
            "mamba_layer_ids": [0, 2],
            "enable_mamba_extra_buffer": False,
        }
        self.rows = mp.HybridReqToTokenPool(**{name: value for name, value in given.items() if name in names})
        mamba = self.rows.mamba_pool
        self.pool = mp.HybridLinearKVPool(512, torch.bfloat16, 1, 2, 16, [1, 3], "cpu", mamba)
        self.cache = mamba.mamba_cache
        self.allocator = TokenToKVPoolAllocator(512, torch.bfloat16, "cpu", self.pool, False)
        self.reporter = ListReporter()
        guarded = adapt_pool(
            self.pool, self.allocator, self.rows.req_to_token, "all", model="test", request_pool=self.rows
        )
        self.guard = Guard(guarded, Config(mode="log", checks=WITHOUT_OWNERSHIP, **options), self.reporter)
        self.random = torch.Generator().manual_seed(0)
        self.page_size = 1
        self._count = 0
        self._running: list[int] = []

    def forward(self, requests: Any, starts: list[int], ends: list[int], mode: ForwardMode) -> None:
        self._running = [request.req_pool_idx for request in requests]
        super().forward(requests, starts, ends, mode)

    def store(self, slots: torch.Tensor) -> None:
        for layer in (1, 3):
            k, v = (torch.randn((len(slots), 2, 16), generator=self.random).bfloat16() for _ in range(2))
            self.pool.set_kv_buffer(SimpleNamespace(layer_id=layer), slots, k, v)
        for row in self._running:  # a linear layer rewrites the state of every request
            state = self.state_of(row)
            self.cache.temporal[:, state] += torch.randn(self.cache.temporal[:, state].shape, generator=self.random)
            self.cache.conv[0][:, state] += 1

    def state_of(self, row: int) -> int:
        return int(self.rows.req_index_to_mamba_index_mapping[row])


@pytest.fixture
def engine() -> HybridEngine:
    return HybridEngine()


def start(engine: HybridEngine):
    one, other = engine.request(20), engine.request(9)
    engine.prefill(one, other)
    engine.run(one, other, steps=4)
    return one, other


def test_states_that_forwards_rewrite_are_silent(engine: HybridEngine):
    one, other = start(engine)
    third = engine.request(30)
    engine.prefill(third, upto=11)
    engine.run(one, other, steps=2)
    engine.prefill(third)
    engine.run(one, other, third, steps=12)
    assert engine.violations == []
    assert sum(watch.compared for watch in engine.guard.states) > 10


@pytest.mark.parametrize("part", ["SSM", "conv 0"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_state_that_changed_between_forwards_is_named(engine: HybridEngine, part: str, layer: int):
    one, other = start(engine)
    for request in (one, other):  # whichever of them is watched now
        tensor = self_of(engine, part)[layer // 2, engine.state_of(request.req_pool_idx)]
        tensor.view(-1)[3] += 1
    engine.run(one, other, steps=4)
    (violation,) = engine.violations
    assert (violation.check, violation.kind, violation.layer, violation.half) == ("content", "state", layer, part)
    assert violation.request in (one.rid, other.rid)
    watched = one if violation.request == one.rid else other
    assert violation.slot == engine.state_of(watched.req_pool_idx)


def self_of(engine: HybridEngine, part: str) -> torch.Tensor:
    return engine.cache.temporal if part == "SSM" else engine.cache.conv[0]


def test_a_state_that_went_to_another_slot_is_not_compared(engine: HybridEngine):
    one, other = start(engine)
    rows = torch.tensor([one.req_pool_idx, other.req_pool_idx])
    mapping = engine.rows.req_index_to_mamba_index_mapping
    moved = torch.tensor([14, 15], dtype=mapping.dtype)
    for state in (engine.cache.temporal, engine.cache.conv[0]):
        state[:, moved.long()] = state[:, mapping[rows].long()]
        state[:, mapping[rows].long()] = 0
    mapping[rows] = moved
    engine.run(one, other, steps=4)
    assert engine.violations == []


def test_a_state_slot_that_passes_to_another_request_is_silent(engine: HybridEngine):
    one, _ = start(engine)
    engine.finish(one)
    heir = engine.request(12)
    engine.prefill(heir)
    engine.run(heir, steps=6)
    assert engine.violations == []


def test_a_request_that_was_retracted_starts_anew_silently(engine: HybridEngine):
    one, _ = start(engine)
    row, state = one.req_pool_idx, engine.state_of(one.req_pool_idx)
    one.retraction_count += 1
    one.kv_committed_len = 0
    engine.cache.temporal[:, state] = 0
    engine.prefill(one)
    assert one.req_pool_idx == row
    engine.run(one, steps=3)
    assert engine.violations == []


def test_the_attention_part_is_guarded_as_ever(engine: HybridEngine):
    one, other = start(engine)
    slot = int(engine.slots_of(one)[5])
    engine.pool.full_kv_pool.k_buffer[1].view(torch.uint8)[slot, 0, 3] ^= 1
    engine.settle_scrub()
    (violation,) = engine.violations
    assert (violation.check, violation.kind, violation.layer, violation.slot) == ("content", "content", 3, slot)
    assert other.rid != violation.request
