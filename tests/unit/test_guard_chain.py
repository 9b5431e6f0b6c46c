"""The guard (chain) on the real pool, allocator, request table, Req and ForwardBatch of SGLang."""

import pytest
import torch

from kvcanary_plugin.runtime.identity import conceal
from tests.engine import Engine


def test_exchanged_row_entries_are_both_named(page_size):
    engine = Engine(page_size=page_size)
    request = engine.request(30)
    engine.prefill(request)
    slots = engine.slots_of(request)
    engine.rows.req_to_token[request.req_pool_idx, [5, 20]] = slots[[20, 5]].int()
    engine.decode(request)

    assert [(v.check, v.kind, v.position, v.slot) for v in engine.violations] == [
        ("chain", "position", 5, int(slots[20])),
        ("chain", "position", 20, int(slots[5])),
    ]
    first = engine.violations[0]
    assert (first.stored_position, first.expected_token, first.stored_token) == (
        20,
        request.origin_input_ids[5],
        request.origin_input_ids[20],
    )
    assert (first.request, first.request_row, first.step) == (request.rid, request.req_pool_idx, 2)
    assert (first.writer.step, first.writer.request) == (1, request.rid)
    assert first.page == (int(slots[20]) // 16 if page_size > 1 else None)


def test_slot_of_another_request_at_the_same_position_is_named():
    engine = Engine()
    victim, other = engine.request(30), engine.request(30)
    engine.prefill(victim, other)
    foreign = engine.slots_of(other)[12]
    engine.rows.req_to_token[victim.req_pool_idx, 12] = foreign
    engine.decode(victim, other)

    (violation,) = engine.violations
    assert (violation.kind, violation.position, violation.slot) == ("link", 12, int(foreign))
    assert violation.stored_hash != violation.expected_hash
    assert violation.writer.request == other.rid


def test_whole_prefix_of_another_request_is_found_though_consistent_in_itself():
    engine = Engine()
    shared = list(range(10))
    victim, other = (
        engine.request(tokens=[*shared, *range(100, 120)]),
        engine.request(tokens=[*shared, *range(200, 225)]),
    )
    engine.prefill(victim, other)
    foreign = engine.slots_of(other)
    engine.rows.req_to_token[victim.req_pool_idx, :30] = foreign[:30].int()
    engine.decode(victim, other)

    (violation,) = engine.violations
    assert (violation.position, violation.slot, violation.expected_token, violation.stored_token) == (
        10,
        int(foreign[10]),
        100,
        200,
    )


def test_part_of_a_foreign_prefix_is_named_where_it_begins():
    engine = Engine()
    victim, other = engine.request(30), engine.request(30)
    engine.prefill(victim, other)
    foreign = engine.slots_of(other)
    engine.rows.req_to_token[victim.req_pool_idx, 8:15] = foreign[8:15].int()
    engine.decode(victim, other)

    assert [(v.position, v.slot) for v in engine.violations] == [(8, int(foreign[8]))]


def test_same_tokens_under_another_namespace_are_found():
    engine = Engine()
    tokens = list(range(20))
    mine = engine.request(tokens=tokens, extra_key="tenant-a")
    theirs = engine.request(tokens=tokens, extra_key="tenant-b")
    engine.prefill(mine, theirs)
    engine.rows.req_to_token[mine.req_pool_idx, :20] = engine.slots_of(theirs).int()
    engine.decode(mine, theirs)

    (violation,) = engine.violations
    assert (violation.check, violation.kind, violation.position) == ("identity", "other_identity", 0)
    assert violation.differs == (("extra_key", conceal("tenant-a"), conceal("tenant-b")),)


def test_without_the_identity_check_it_is_a_chain_that_ends_elsewhere():
    engine = Engine(checks=("chain",))
    tokens = list(range(20))
    mine = engine.request(tokens=tokens, extra_key="tenant-a")
    theirs = engine.request(tokens=tokens, extra_key="tenant-b")
    engine.prefill(mine, theirs)
    engine.rows.req_to_token[mine.req_pool_idx, :20] = engine.slots_of(theirs).int()
    engine.decode(mine, theirs)

    (violation,) = engine.violations
    assert (violation.kind, violation.position) == ("end_point", 0)
    assert violation.stored_token == violation.expected_token


def test_double_allocated_slot_is_found_by_the_request_that_lost_it():
    engine = Engine()
    victim = engine.request(20)
    engine.prefill(victim)
    stolen = engine.slots_of(victim)[4:5]
    engine.allocator.free_pages = torch.cat((stolen, engine.allocator.free_pages))
    thief = engine.request(3)
    engine.prefill(thief)
    engine.decode(victim, thief)

    assert [(v.request, v.position, v.slot, v.writer.request) for v in engine.violations] == [
        (victim.rid, 4, int(stolen[0]), thief.rid)
    ]


def test_freed_slot_that_is_still_read_is_found(page_size):
    engine = Engine(page_size=page_size)
    request = engine.request(32)
    engine.prefill(request)
    engine.guard.traffic.release(engine.slots_of(request)[16:17])
    engine.decode(request)

    positions = [v.position for v in engine.violations]
    assert positions == ([16] if page_size == 1 else list(range(16, 32)))
    assert {v.kind for v in engine.violations} == {"dead_slot"}


@pytest.mark.parametrize("slot", [-1, 0, 513, 2**31 - 1, -(2**31)])
def test_slot_outside_the_pool_is_reported_and_not_followed(slot):
    engine = Engine()
    request = engine.request(20)
    engine.prefill(request)
    engine.rows.req_to_token[request.req_pool_idx, 7] = slot
    engine.guard.announce([request], [request.req_pool_idx], [20], [1])
    engine.guard.before(torch.tensor([1]), torch.tensor([400]), torch.tensor([request.req_pool_idx]))
    engine.guard.after()
    engine.guard.note_launched(engine)
    request.output_ids.append(1)
    engine.guard.settle(engine)

    assert [(v.kind, v.position, v.slot) for v in engine.violations] == [("slot_range", 7, slot)]


@pytest.mark.parametrize("row", [-1, 0, 17, 2**40])
def test_row_outside_the_table_is_reported_and_not_followed(row):
    engine = Engine()
    request = engine.request(20)
    engine.prefill(request)
    engine.guard.announce([request], [request.req_pool_idx], [20], [1])
    engine.guard.before(torch.tensor([1]), torch.tensor([400]), torch.tensor([row]))
    engine.guard.after()
    engine.guard.note_launched(engine)
    engine.guard.settle(engine)

    assert [(v.kind, v.slot) for v in engine.violations] == [("row_range", row)]


@pytest.mark.parametrize("slot", [-1, 0, 513, 2**40])
def test_store_outside_the_pool_is_reported_and_makes_no_record(slot):
    engine = Engine()
    request = engine.request(3)
    engine.rows.alloc([request])
    before = engine.guard.records.hot[1:].clone()
    engine.guard.announce([request], [request.req_pool_idx], [0], [3])
    engine.guard.before(torch.tensor([1, 2, 3]), torch.tensor([5, slot, 6]), torch.tensor([request.req_pool_idx]))
    engine.guard.after()
    engine.guard.note_launched(engine)
    engine.guard.settle(engine)

    assert [(v.kind, v.phase, v.position, v.slot) for v in engine.violations] == [("write_range", "write", 1, slot)]
    changed = (engine.guard.records.hot[1:] != before).any(1).nonzero().flatten() + 1
    assert changed.tolist() == [5, 6]


def test_a_token_that_is_right_by_chance_does_not_split_a_foreign_stretch():
    engine = Engine()
    victim, other = engine.request(30), engine.request(30)
    other.origin_input_ids[12] = victim.origin_input_ids[12]
    engine.prefill(victim, other)
    foreign = engine.slots_of(other)
    engine.rows.req_to_token[victim.req_pool_idx, 8:20] = foreign[8:20].int()
    engine.decode(victim, other)

    assert [(v.kind, v.position) for v in engine.violations] == [("link", 8)]


def test_a_damaged_record_is_named_where_it_is():
    engine = Engine()
    request = engine.request(30)
    engine.prefill(request)
    engine.guard.records.hot[engine.slots_of(request)[11], 0] ^= 1 << 40
    engine.decode(request)

    assert [(v.kind, v.position) for v in engine.violations] == [("link", 11)]


def test_another_fault_of_another_row_on_the_same_slot_is_reported_too():
    engine = Engine()
    one, other = engine.request(30), engine.request(30)
    engine.prefill(one, other)
    shared = engine.slots_of(one)[20]
    engine.rows.req_to_token[one.req_pool_idx, 4] = shared
    engine.decode(one, other)
    engine.rows.req_to_token[other.req_pool_idx, 9] = shared
    engine.decode(one, other)
    engine.decode(one, other)

    assert [(v.request, v.position, v.slot) for v in engine.violations] == [
        (one.rid, 4, int(shared)),
        (other.rid, 9, int(shared)),
    ]
