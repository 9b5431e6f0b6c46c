"""Models with sliding-window layers: a full space and one of the window, reached through SGLang's live mapping."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.common import free_swa_out_of_window_slots
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from kvcanary_plugin.config import Config
from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.pool_patcher.adapters import adapt_pool
from kvcanary_plugin.runtime.finding import Finder
from kvcanary_plugin.runtime.guard import Guard
from tests.engine import CONTEXT, WITHOUT_OWNERSHIP, Engine, ListReporter

WINDOW = 8


class WindowEngine(Engine):
    """Two window layers and one full layer on SGLang's own pool and allocator, with its own eviction."""

    def __init__(self, **options: Any) -> None:
        self.pool = SWAKVPool(256, 128, 1, torch.bfloat16, 2, 16, [0, 2], [1], "cpu")
        self.allocator = SWATokenToKVPoolAllocator(256, 128, 1, torch.bfloat16, "cpu", self.pool, False)
        self.rows = ReqToTokenPool(16, CONTEXT, "cpu", False)
        self.reporter = ListReporter()
        guarded = adapt_pool(self.pool, self.allocator, self.rows.req_to_token, "all", model="test", window=WINDOW)
        self.guard = Guard(guarded, Config(mode="log", checks=WITHOUT_OWNERSHIP, **options), self.reporter)
        self.random = torch.Generator().manual_seed(0)
        self.page_size = 1
        self._count = 0
        for inner in (self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator):
            self._watch(inner)

    def _watch(self, inner: Any) -> None:
        free = inner.free

        def watched(slots: torch.Tensor) -> None:
            self.guard.traffic.release(slots, inner)
            free(slots)

        inner.free = watched

    def store(self, slots: torch.Tensor) -> None:
        where = KVWriteLoc(slots, self.allocator.full_to_swa_index_mapping[slots])
        for layer in range(3):
            k, v = (torch.randn((len(slots), 2, 16), generator=self.random).bfloat16() for _ in range(2))
            self.pool.set_kv_buffer(SimpleNamespace(layer_id=layer), where, k, v)

    def run(self, *requests: Any, steps: int = 5) -> None:
        for _ in range(steps):
            for request in requests:
                free_swa_out_of_window_slots(
                    request,
                    request.kv_committed_len,
                    sliding_window_size=WINDOW,
                    page_size=1,
                    req_to_token_pool=self.rows,
                    token_to_kv_pool_allocator=self.allocator,
                )
            self.decode(*requests)

    def finish(self, request: Any, *, keep: int = 0) -> torch.Tensor:
        slots = self.slots_of(request)
        self.allocator.free(slots[keep:])
        self.rows.free_slots.append(request.req_pool_idx)
        request.req_pool_idx = None
        return slots[:keep]

    def window_slot(self, request: Any, position: int) -> int:
        return int(self.allocator.full_to_swa_index_mapping[self.slots_of(request)[position]])

    def settle_scrub(self) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        for _ in range(2 * max(space.scrubber.period_forwards for space in self.guard.spaces) + 2):
            self.forward([], [], [], ForwardMode.IDLE)


@pytest.fixture
def engine() -> WindowEngine:
    return WindowEngine()


def running(engine: WindowEngine):
    one, other = engine.request(20), engine.request(3)
    engine.prefill(one, other)
    engine.run(one, other, steps=15)
    return one, other


def test_requests_that_outgrow_the_window_are_silent(engine: WindowEngine):
    one, other = running(engine)
    assert engine.window_slot(one, 5) == 0  # freed while the request runs
    engine.finish(one)
    third = engine.request(30)
    engine.prefill(third)
    engine.run(other, third, steps=12)
    engine.settle_scrub()
    assert engine.violations == []
    assert engine.guard.spaces[1].presence.learned.unstored == ()


def test_window_slots_are_taken_over_silently(engine: WindowEngine):
    for _ in range(12):  # far more tokens than the window's pool has slots
        request = engine.request(40)
        engine.prefill(request)
        engine.run(request, steps=10)
        engine.finish(request)
    assert engine.violations == []


@pytest.mark.parametrize(
    ("layer", "space"), [(0, "full and window/window"), (1, "full and window"), (2, "full and window/window")]
)
@pytest.mark.parametrize("half", ["K", "V"])
def test_a_flipped_bit_is_placed_in_its_space(engine: WindowEngine, layer: int, space: str, half: str):
    one, _ = running(engine)
    position = one.kv_committed_len - 2
    slot = int(engine.slots_of(one)[position]) if layer == 1 else engine.window_slot(one, position)
    sub_pool = engine.pool.full_kv_pool if layer == 1 else engine.pool.swa_kv_pool
    index = {0: 0, 1: 0, 2: 1}[layer]
    buffer = (sub_pool.k_buffer if half == "K" else sub_pool.v_buffer)[index]
    buffer.view(torch.uint8)[slot, 1, 5] ^= 16
    engine.settle_scrub()
    (violation,) = engine.violations
    assert (violation.check, violation.pool, violation.slot) == ("content", space, slot)
    assert (violation.layer, violation.half, violation.position) == (layer, half, position)


def test_exchanged_window_slots_are_found(engine: WindowEngine):
    one, _ = running(engine)
    a, b = engine.slots_of(one)[[-3, -5]]
    mapping = engine.allocator.full_to_swa_index_mapping
    mapping[[int(a), int(b)]] = mapping[[int(b), int(a)]]
    engine.decode(one)
    assert {v.check for v in engine.violations} == {"chain"}
    assert {v.pool for v in engine.violations} == {"full and window/window"}
    assert {one.kv_committed_len - 1 - 3, one.kv_committed_len - 1 - 5} <= {v.position for v in engine.violations}


def test_a_window_slot_of_another_request_is_found(engine: WindowEngine):
    one, other = running(engine)
    mapping = engine.allocator.full_to_swa_index_mapping
    mapping[engine.slots_of(one)[-2]] = mapping[engine.slots_of(other)[-2]]
    engine.decode(one, other)
    assert next((v.request, v.pool) for v in engine.violations) == (one.rid, "full and window/window")


def test_a_slot_within_the_window_that_was_freed_is_named(engine: WindowEngine):
    one, _ = running(engine)
    engine.allocator.free_swa(engine.slots_of(one)[-4:-3])
    engine.decode(one)
    violation = engine.violations[0]
    assert (violation.check, violation.kind) == ("chain", "unmapped")
    assert (violation.request, violation.position) == (one.rid, one.kv_committed_len - 1 - 4)


def test_slots_behind_the_window_are_nobodys_concern(engine: WindowEngine):
    one, _ = running(engine)
    engine.guard.spaces[1].records.hot[1:, r.CHAIN] += 0
    mapping = engine.allocator.full_to_swa_index_mapping
    mapping[engine.slots_of(one)[0]] = 77  # out of the window: never followed
    engine.run(one, steps=3)
    assert [v for v in engine.violations if v.request == one.rid] == []


def test_a_window_layer_that_is_not_stored_is_named(engine: WindowEngine):
    one, _ = running(engine)

    def store(slots: torch.Tensor) -> None:
        kept = engine.pool.swa_kv_pool.k_buffer[1].clone()
        WindowEngine.store(engine, slots)
        where = engine.allocator.full_to_swa_index_mapping[slots]
        engine.pool.swa_kv_pool.k_buffer[1][where] = kept[where]

    engine.store = store
    engine.decode(one)
    (violation,) = engine.violations
    assert (violation.check, violation.layer, violation.half) == ("presence", 2, "K")


@pytest.mark.parametrize("layer", [0, 1])
def test_what_the_pass_finds_concerns_the_main_slot_of_whoever_reads_it(engine: WindowEngine, layer: int):
    """Damage in the window's own space is not nobody's: it taints that prefix alone, and takes out that slot."""
    request, _ = running(engine)
    place = request.kv_committed_len - 3
    main, window = int(engine.slots_of(request)[place]), engine.window_slot(request, place)
    buffer, slot = (engine.pool.swa_kv_pool, window) if layer == 0 else (engine.pool.full_kv_pool, main)
    buffer.k_buffer[0].view(torch.int16)[slot, 0, 3] ^= 1 << 7
    engine.settle_scrub()
    [violation] = engine.reporter.violations
    finding = Finder(engine.guard).find(violation, None)
    assert (finding.slot, finding.position) == (main, place)
    assert finding.is_withheld
    assert finding.is_spoiled
    assert finding.is_tainted
    assert not finding.is_everywhere


def test_a_slot_of_the_window_that_nobody_names_is_nobodys(engine: WindowEngine):
    running(engine)
    free = int(engine.allocator.swa_attn_allocator.free_pages[0])
    assert [engine.guard.spaces[1].main_slot_of(slot) for slot in (-1, 0, free)] == [-1, -1, -1]
