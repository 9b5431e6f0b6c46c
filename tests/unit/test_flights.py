"""Slots that a transfer between servers uses: freed they may be, given out not before it is over."""

import pytest

from kvcanary_plugin.kernels import ledger as g
from tests.flying import OTHER, ROOM, Pool


@pytest.fixture(params=[1, 16])
def pool(request):
    pool = Pool(request.param)
    yield pool
    pool.close()


def test_what_is_freed_on_the_way_is_no_fault_and_what_is_given_out_is(pool):
    slots = pool.ask()
    pool.begin(slots)
    pool.allocator.free(slots)
    assert pool.look() == []
    found = pool.give_all()
    assert {(f.kind, f.phase, f.state, f.owner) for f in found} == {
        ("reused_in_flight", "alloc", "free+in_flight", "request 7")
    }
    assert {f.slot for f in found} == set(slots.tolist())
    assert "the transfer of request 7 may still write it, or read it to send it" in found[0].evidence
    pool.flights.end(ROOM)
    assert pool.look() == []
    assert not bool((pool.ledger.words & g.AIMED).any()), "nothing is left behind"


@pytest.mark.parametrize("ends", ["end", "answer", "lose", "end_one"])
def test_what_is_given_out_once_it_is_over_is_no_fault(pool, ends):
    slots = pool.ask()
    flight = pool.begin(slots, peer="prefill:1")
    pool.allocator.free(slots)
    pool.look()
    getattr(pool.flights, ends)({"lose": "prefill:1", "end_one": flight}.get(ends, ROOM))
    assert pool.give_all() == []
    assert pool.flights.count == 0


def test_every_server_that_sends_must_answer(pool):
    slots = pool.ask()
    pool.begin(slots, answers=2)
    pool.allocator.free(slots)
    pool.flights.answer(ROOM)
    assert pool.flights.count == 1
    assert {f.kind for f in pool.give_all()} == {"reused_in_flight"}


def test_the_end_of_one_transfer_is_not_that_of_another_on_the_same_page(pool):
    """On the side that sends, requests share a prefix."""
    slots = pool.ask()
    pool.begin(slots)
    pool.begin(slots, OTHER)
    pool.flights.end(OTHER)
    pool.allocator.free(slots)
    found = pool.give_all()
    assert {f.owner for f in found} == {"request 7"}
    assert len(found) == len(slots)


def test_a_row_that_got_the_slots_meanwhile_is_named_as_the_taker_not_as_the_victim(pool):
    slots = pool.ask()
    pool.begin(slots)
    pool.allocator.free(slots)
    again = pool.allocator.alloc(pool.allocator.available_size())
    pool.begin(again, OTHER)
    pool.flights.end(ROOM)
    assert {f.owner for f in pool.look()} == {"request 7"}
    pool.flights.end(OTHER)
    pool.allocator.free(again)
    assert pool.give_all() == []


def test_a_flush_forgets_what_was_on_its_way(pool):
    slots = pool.ask()
    pool.begin(slots)
    pool.allocator.clear()
    pool.flights.end(ROOM)
    assert pool.flights.count == 0
    assert pool.give_all() == []
