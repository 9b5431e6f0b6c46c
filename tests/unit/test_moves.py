"""Rows that change their slot, or leave the pool and come back: their records go with them."""

from __future__ import annotations

import gc

import pytest
import torch

from kvcanary_plugin.runtime.copies import find_tensor
from tests.engine import Engine
from tests.unit.test_window import WindowEngine


@pytest.fixture(autouse=True)
def moves_without_a_gpu_kernel(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_NATIVE_MOVE_KV_CACHE", "1")


def running(engine: Engine, length: int = 30):
    request = engine.request(length)
    engine.prefill(request)
    engine.run(request, steps=6)
    return request


def move(engine: Engine, request, positions: list[int], *, tell: bool = True) -> None:
    """Compaction: rows to other slots, by the pool's own means."""
    source = engine.slots_of(request)[positions]
    target = engine.allocator.alloc(len(positions))
    engine.pool.move_kv_cache(target, source)
    if tell:
        engine.guard.traffic.move(engine.pool, target, source)
    engine.rows.req_to_token[request.req_pool_idx, positions] = target.int()
    engine.guard.traffic.release(source)
    engine.allocator.free(source)


def test_moved_rows_keep_their_records():
    engine = Engine()
    request = running(engine)
    move(engine, request, [3, 4, 17, 35])
    engine.run(request, steps=4)
    engine.settle_scrub()
    assert engine.violations == []


def test_a_move_that_nobody_told_of_is_found():
    engine = Engine()
    request = running(engine)
    move(engine, request, [3, 4], tell=False)
    engine.decode(request)
    assert {(v.check, v.position) for v in engine.violations} == {("chain", 3), ("chain", 4)}


def test_a_move_that_copies_wrong_bytes_is_found():
    engine = Engine()
    request = running(engine)
    move(engine, request, [8, 9])
    engine.pool.v_buffer[1][engine.slots_of(request)[9], 0, 0] += 1
    engine.settle_scrub()
    (violation,) = engine.violations
    assert (violation.check, violation.position, violation.layer, violation.half) == ("content", 9, 1, "V")


def test_moves_of_other_pools_are_nobodys_concern():
    engine, other = Engine(), Engine()
    request = running(engine)
    slots = engine.slots_of(request)
    engine.guard.traffic.move(other.pool, slots[:3], slots[3:6])
    engine.run(request, steps=3)
    assert engine.violations == []


def leave_and_return(engine: Engine, request, damage: str | None = None):
    """Retraction with offload: out to host memory, slots given up, and back into others."""
    allocator = engine.allocator
    inner = getattr(allocator, "full_attn_allocator", allocator)
    slots = engine.slots_of(request)
    copy = engine.pool.get_cpu_copy(slots)
    engine.guard.traffic.note_copied(inner, slots, copy)
    if inner is allocator:
        engine.guard.traffic.release(slots)
    allocator.free(slots)
    engine.prefill(other := engine.request(25))  # somebody else takes the slots
    engine.run(other, steps=2)
    if damage == "copy":
        find_tensor(copy).view(-1)[7] += 1
    fresh = allocator.alloc(len(slots))
    engine.pool.load_cpu_copy(copy, fresh)
    engine.guard.traffic.note_loaded(inner, fresh, copy)
    engine.rows.req_to_token[request.req_pool_idx, : len(slots)] = fresh.int()
    return other


def test_rows_that_come_back_intact_are_silent():
    engine = Engine()
    request = running(engine)
    other = leave_and_return(engine, request)
    engine.run(request, other, steps=4)
    engine.settle_scrub()
    assert engine.violations == []


def test_rows_that_come_back_damaged_are_found_when_they_do():
    engine = Engine()
    request = running(engine)
    leave_and_return(engine, request, damage="copy")
    engine.decode(request)
    (violation,) = engine.violations
    assert (violation.check, violation.step) == ("content", engine.guard.forwards)


def test_window_rows_come_back_with_their_records():
    engine = WindowEngine()
    request = running(engine)
    leave_and_return(engine, request)
    engine.decode(request)
    engine.settle_scrub()
    assert engine.violations == []


def test_records_go_when_the_copy_goes():
    engine = Engine()
    request = running(engine)
    copy = engine.pool.get_cpu_copy(engine.slots_of(request))
    engine.guard.traffic.note_copied(engine.allocator, engine.slots_of(request), copy)
    assert len(engine.guard.traffic._copies._records) == 1
    del copy
    gc.collect()
    assert len(engine.guard.traffic._copies._records) == 0


@pytest.mark.parametrize("nested", [{"a": [torch.ones(1)]}, [[], (torch.ones(1),)], torch.ones(1)])
def test_a_tensor_is_found_wherever_it_is(nested: object):
    assert isinstance(find_tensor(nested), torch.Tensor)
    assert find_tensor([{}, ()]) is None


@pytest.mark.parametrize("slots", [[17], [16, 31, 80], list(range(1, 97)), [-5, 17, 10**6]])
def test_many_freed_slots_release_the_same_pages_as_few(slots: list[int]):
    """Freeing is by page; what a large free does by one look at every record, small ones do slot by slot."""
    engines = [Engine(page_size=16, size=96) for _ in range(2)]
    for engine in engines:
        engine.guard.records.hot[:, 3] = 1 << 60
    few, many = (engine.guard.records for engine in engines)
    few.release(torch.tensor(slots))
    many._release_pages(torch.tensor(slots))
    assert torch.equal(few.hot[16:], many.hot[16:])  # the padding is never looked at
