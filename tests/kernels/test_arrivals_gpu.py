"""KV that has come from another server, compared on a stream of its own, beside forwards and without a wait."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from kvcanary_plugin.kernels import record as r

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "kernels"))

pytestmark = pytest.mark.gpu
ROOM, LENGTH = 7, 300


@pytest.fixture(autouse=True)
def needs_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")


def make_arrival():
    """A running loop, one of whose requests has come once more: its KV is there, its records are in the inbox."""
    from host_step import DecodeLoop

    torch.manual_seed(0)
    loop = DecodeLoop(4, LENGTH, torch.device("cuda"), captured=True)
    loop.found = []
    loop._reporter.report = lambda violations: loop.found.extend(violations) or violations
    loop.guard.open_handover(1, receives=True)
    for _ in range(4):
        loop.step()
    request = loop.requests[2]
    request.req_pool_idx, request.kv_committed_len = 3, LENGTH
    slots = loop._slots[2, :LENGTH]
    handover = loop.guard.traffic.handover
    handover.hot[slots] = loop.guard.records.hot[slots]
    handover.records.writers[slots] = 5 << r.WRITER_ROW_BITS | 1  # of the other server's forwards
    return loop, request, slots


def settle(loop, request):
    arrivals = loop.guard.traffic.arrivals
    arrivals.expect(ROOM, request)
    answers = [arrivals.settle(ROOM)]
    torch.cuda.synchronize()
    answers.append(arrivals.settle(ROOM))
    arrivals.forget(ROOM)
    return answers


@pytest.mark.parametrize("damage", ["chain", "content", "dead", "slot"])
def test_damage_is_found_where_it_is(damage: str):
    loop, request, slots = make_arrival()
    assert settle(loop, request)[-1]
    assert loop.found == []
    place, slot = 77, int(slots[77])
    if damage == "content":
        loop.guard.pool.table.sources[9].rows[slot, 0, 5] ^= 4
    elif damage == "slot":
        loop.guard.pool.req_to_token[3, place] = -5
    else:
        loop.guard.traffic.handover.hot[slot] = 0 if damage == "dead" else loop.guard.traffic.handover.hot[slots[3]]
    assert settle(loop, request)[-1]
    expected = {"chain": ("chain", "position"), "dead": ("chain", "dead_slot"), "slot": ("chain", "slot_range")}
    told = {(v.check, v.kind, v.slot, v.position, v.phase, v.writer, v.request) for v in loop.found}
    where = -5 if damage == "slot" else slot
    check, kind = expected.get(damage, ("content", "content"))
    assert (check, kind, where, place, "arrival", None, request.rid) in told
    assert {position for *_, position, _, _, _ in told} <= {place, place + 1, LENGTH - 1}


def test_nobody_waits_for_it():
    loop, request, slots = make_arrival()
    loop.guard.pool.table.sources[9].rows[int(slots[77]), 0, 5] ^= 4
    arrivals = loop.guard.traffic.arrivals
    arrivals.expect(ROOM, request)
    with torch.cuda.stream(arrivals._stream):
        torch.cuda._sleep(2_000_000_000)
    assert [arrivals.settle(ROOM) for _ in range(3)] == [False] * 3
    assert loop.found == []
    torch.cuda.synchronize()
    assert arrivals.settle(ROOM)
    assert {(v.check, v.phase, v.position) for v in loop.found} == {("content", "arrival", 77)}


def test_it_comes_behind_what_the_scheduler_has_just_queued():
    """The row is filled on the scheduler's stream, which may not have come to it yet."""
    loop, request, _ = make_arrival()
    rows = loop.guard.pool.req_to_token
    kept = rows[3, :LENGTH].clone()
    rows[3, :LENGTH] = -1
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        rows[3, :LENGTH] = kept
        assert settle(loop, request) == [False, True]
    assert loop.found == []


def test_it_goes_on_beside_forwards_and_idle_passes():
    """Folds of several streams do not get in each other's way."""
    loop, request, _ = make_arrival()
    arrivals = loop.guard.traffic.arrivals
    for room in range(200):
        arrivals.expect(room, request)
        arrivals.settle(room)
        loop.step()
        if room % 10 == 0:
            loop.guard.idle()
        assert arrivals.settle(room)
        arrivals.forget(room)
    assert loop.found == []
