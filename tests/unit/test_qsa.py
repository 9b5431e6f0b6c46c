"""QSA: an index with one key for each group of positions, made from keys that wait in a ring of their request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import memory_pool as mp
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from kvcanary_plugin.config import Config
from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.pool_patcher.adapters import adapt_pool
from kvcanary_plugin.runtime.guard import Guard
from tests.engine import WITHOUT_OWNERSHIP, Engine, ListReporter
from tests.pools.qsa import ATTENTION, PAGE, RATIO, qsa_pool


class IndexedEngine(Engine):
    """Attention in layers 1 and 3, whose index has a key for 4 positions; pages of 8."""

    def __init__(self) -> None:
        built = qsa_pool(size=512, requests=16)
        self.pool, self.allocator, self.rows = built.pool, built.allocator, built.rows
        self.reporter = ListReporter()
        guarded = adapt_pool(
            self.pool, self.allocator, self.rows.req_to_token, "all", model="test", request_pool=self.rows
        )
        self.guard = Guard(guarded, Config(mode="log", checks=WITHOUT_OWNERSHIP), self.reporter)
        self.random = torch.Generator().manual_seed(0)
        self.page_size = PAGE
        self.skipped: int | None = None  # the layer whose index the next forward does not store
        self._count = 0

    def request(self, length: int = 0, **options: Any) -> Any:
        """It has its row and its state from the start: releases with this pool keep them in a part of the request."""
        request = super().request(length, **options)
        (request.req_pool_idx,) = self.rows.alloc_rows(1)
        self.rows.req_index_to_mamba_index_mapping[request.req_pool_idx] = request.req_pool_idx
        request.kv_committed_len = 0
        return request

    def forward(self, requests: Any, starts: list[int], ends: list[int], mode: ForwardMode) -> None:
        self._stored = [
            (request.req_pool_idx, position)
            for request, start, end in zip(requests, starts, ends, strict=True)
            for position in range(start, end)
        ]
        super().forward(requests, starts, ends, mode)

    def store(self, slots: torch.Tensor) -> None:
        """Raw keys into the ring, and a key for each group that is complete: entry 0 for none, as SGLang's kernel."""
        if not self._stored:
            return
        rows, positions = torch.tensor(self._stored).unbind(1)
        ring = rows * RATIO + positions % RATIO
        complete = torch.where((positions + 1) % RATIO == 0, slots // RATIO, 0)
        for layer in ATTENTION:
            k, v = (torch.randn((len(slots), 2, 4), generator=self.random).bfloat16() for _ in range(2))
            self.pool.set_kv_buffer(SimpleNamespace(layer_id=layer), mp.KVWriteLoc(slots), k, v)
            keys = torch.randn((2, len(slots), 1, 8), generator=self.random)
            self.pool.set_qsa_key_state_buffer(layer, ring, keys[0])
            if layer != self.skipped:
                self.pool.set_qsa_compressed_k_buffer(layer, complete, keys[1])
        self.pool.set_qsa_rope_position_buffer(ring, positions)
        self.skipped = None

    def entry_of(self, request: Any, position: int) -> int:
        return int(self.slots_of(request)[position]) // RATIO

    def settle_scrub(self) -> None:
        passes = [space.scrubber.period_forwards for space in self.guard.spaces]
        for _ in range(2 * max(passes) + 2):
            self.forward([], [], [], ForwardMode.IDLE)


@pytest.fixture
def engine() -> IndexedEngine:
    return IndexedEngine()


def running(engine: IndexedEngine):
    """Two requests in the middle of a group, one of them prefilled in chunks of whole groups."""
    one, other = engine.request(22), engine.request(9)
    engine.prefill(one, upto=12)
    engine.prefill(one)
    engine.prefill(other)
    engine.run(one, other, steps=5)
    return one, other


def test_requests_that_complete_groups_are_silent(engine: IndexedEngine):
    one, other = running(engine)
    engine.run(one, other, steps=30)
    engine.finish(one)
    again = engine.request(30)
    engine.prefill(again)
    engine.run(other, again, steps=20)
    engine.settle_scrub()
    groups = engine.guard.spaces[1].records.hot
    live = int((groups[:, r.IDENTITY] & r.LIVE_BIT != 0).sum())

    assert engine.violations == []
    assert live == sum(request.kv_committed_len // RATIO for request in (other, again))
    assert {watch.state.name: watch.compared > 20 for watch in engine.guard.states} == {"state": True, "ring": True}


@pytest.mark.parametrize("layer", ATTENTION)
def test_a_flipped_bit_of_a_key_is_placed_in_its_group(engine: IndexedEngine, layer: int):
    one, _ = running(engine)
    at = engine.entry_of(one, 2 * RATIO)
    engine.pool.get_qsa_compressed_k_buffer(layer).view(torch.uint8)[at, 0, 3] ^= 16
    engine.settle_scrub()
    (violation,) = engine.violations

    assert (violation.check, violation.kind, violation.pool) == ("content", "content", "QSA/groups")
    assert (violation.layer, violation.half, violation.slot) == (layer, "index", at)
    assert violation.position == 3 * RATIO - 1


def test_a_key_that_is_not_stored_is_named(engine: IndexedEngine):
    one, _ = running(engine)
    engine.run(one, steps=-(one.kv_committed_len + 1) % RATIO)
    engine.skipped = 3
    engine.decode(one)
    (violation,) = engine.violations

    assert (violation.check, violation.kind, violation.request) == ("presence", "not_stored", one.rid)
    assert (violation.pool, violation.layer, violation.half) == ("QSA/groups", 3, "index")


def test_the_key_of_another_request_is_named(engine: IndexedEngine):
    one, other = running(engine)
    records, at = engine.guard.spaces[1].records.hot, engine.entry_of(one, 0)
    records[at] = records[engine.entry_of(other, 0)]
    engine.decode(one, other)
    (violation,) = [found for found in engine.violations if found.check == "chain"]

    assert (violation.pool, violation.slot, violation.request) == ("QSA/groups", at, one.rid)


@pytest.mark.parametrize("half", ["raw key", "coordinates"])
def test_a_ring_that_changed_between_forwards_is_named(engine: IndexedEngine, half: str):
    one, other = running(engine)
    for request in (one, other):  # whichever of them is watched now
        ring = slice(request.req_pool_idx * RATIO, (request.req_pool_idx + 1) * RATIO)
        if half == "raw key":
            engine.pool.qsa_key_state_buffer_pool[0][ring] += 1
        else:
            engine.pool.qsa_rope_position_buffer[ring] += 1
    engine.decode(one, other)
    (violation,) = engine.violations

    assert (violation.check, violation.kind, violation.pool) == ("content", "state", "QSA/ring")
    assert (violation.layer, violation.half) == (1, half)
    assert violation.request in (one.rid, other.rid)
