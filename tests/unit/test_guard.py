"""The guard on the real pool, allocator, request table, Req and ForwardBatch of SGLang."""

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from kvcanary_plugin.errors import CorruptionError
from tests.engine import Engine


@pytest.fixture(params=[1, 16], ids=lambda size: f"page{size}")
def page_size(request):
    return request.param


def run(engine, *requests, steps=5):
    for _ in range(steps):
        engine.decode(*requests)


# --- clean: nothing may be reported ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48])
def test_prefill_and_decode_are_silent(page_size, length):
    engine = Engine(page_size=page_size)
    one, other = engine.request(length), engine.request(33)
    engine.prefill(one, other)
    run(engine, one, other, steps=20)
    engine.settle_scrub()

    assert engine.violations == []
    assert engine.reporter.counts == {}


def test_chunked_prefill_is_silent(page_size):
    engine = Engine(page_size=page_size)
    request = engine.request(70)
    for end in (32, 64, 70):
        engine.prefill(request, upto=end)
    run(engine, request)

    assert engine.violations == []


def test_shared_prefix_is_silent(page_size):
    engine = Engine(page_size=page_size)
    first = engine.request(40)
    engine.prefill(first)
    run(engine, first)
    prefix = engine.finish(first, keep=32)
    hits = [engine.request(tokens=[*first.origin_input_ids[:32], *range(extra)]) for extra in (1, 7)]
    engine.prefill(*hits, prefix=prefix)
    run(engine, *hits)

    assert engine.violations == []


def test_retraction_and_reuse_of_slots_are_silent(page_size):
    engine = Engine(page_size=page_size, size=96)
    for _ in range(6):
        request = engine.request(30)
        engine.prefill(request)
        run(engine, request)
        engine.finish(request)  # retracted: slots and row are gone, the tokens stay
        request.kv_committed_len = 0
        engine.prefill(request)
        run(engine, request)
        engine.finish(request)
    engine.settle_scrub()

    assert engine.violations == []


def test_mixed_batch_is_silent(page_size):
    engine = Engine(page_size=page_size)
    running, new = engine.request(20), engine.request(25)
    engine.prefill(running)
    engine.rows.alloc([new])
    running.output_ids.append(7)
    engine.forward([new, running], [0, 20], [25, 21], ForwardMode.MIXED)
    run(engine, new, running)

    assert engine.violations == []


def test_flush_is_silent_and_forgets(page_size):
    engine = Engine(page_size=page_size)
    request = engine.request(20)
    engine.prefill(request)
    slots = engine.slots_of(request)
    engine.guard.release_all()
    engine.allocator.clear()
    for buffer in engine.pool.k_buffer:
        buffer.zero_()  # as releasing and resuming memory does
    engine.settle_scrub()

    assert engine.violations == []
    assert not engine.guard.records.hot[slots, 3].bitwise_and(1 << 60).any()


def test_same_request_id_used_twice_is_silent():
    engine = Engine()
    for length in (20, 30):
        request = engine.request(length)
        request.rid = "same"
        engine.prefill(request)
        run(engine, request)
        engine.finish(request)

    assert engine.violations == []


def test_requests_of_different_namespaces_are_silent():
    engine = Engine()
    tokens = list(range(20))
    for key in (None, "tenant-a", "tenant-b"):
        request = engine.request(tokens=tokens, extra_key=key)
        engine.prefill(request)
        run(engine, request)

    assert engine.violations == []


# --- chain ------------------------------------------------------------------------------------------------------------


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
    victim, other = engine.request(tokens=[*shared, *range(100, 120)]), engine.request(tokens=[*shared, *range(200, 225)])
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
    engine.guard.release(engine.slots_of(request)[16:17])
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


# --- content ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("half", ["K", "V"])
def test_one_flipped_bit_is_found_by_the_rotating_pass_in_layer_and_half(page_size, layer, half):
    engine = Engine(page_size=page_size)
    request = engine.request(30)
    engine.prefill(request)
    slot = int(engine.slots_of(request)[9])
    buffer = (engine.pool.k_buffer if half == "K" else engine.pool.v_buffer)[layer]
    buffer.view(torch.int16)[slot, 1, 3] ^= 1 << 13
    for _ in range(engine.guard.scrubber.period_forwards):
        engine.forward([], [], [], ForwardMode.IDLE)

    (violation,) = engine.violations
    assert (violation.check, violation.slot, violation.layer, violation.half) == ("content", slot, layer, half)
    assert (violation.phase, violation.position) == ("scrub", 9)
    assert violation.writer.request == request.rid


def test_damage_in_several_layers_is_not_pinned_on_one():
    engine = Engine()
    request = engine.request(30)
    engine.prefill(request)
    slots = engine.slots_of(request)
    for layer in range(3):
        engine.pool.k_buffer[layer][slots[3]] = engine.pool.k_buffer[layer][slots[4]]
    engine.settle_scrub()

    (violation,) = engine.violations
    assert (violation.slot, violation.layer, violation.half) == (int(slots[3]), None, None)


def test_damaged_cached_prefix_is_found_when_a_request_starts_on_it():
    engine = Engine(size=20000)  # the rotating pass is far away
    first = engine.request(40)
    engine.prefill(first)
    prefix = engine.finish(first, keep=32)
    engine.pool.v_buffer[1].view(torch.int16)[prefix[20], 0, 0] ^= 1
    hit = engine.request(tokens=[*first.origin_input_ids[:32], 1, 2])
    engine.prefill(hit, prefix=prefix)

    (violation,) = [v for v in engine.violations if v.phase == "start"]
    assert (violation.slot, violation.layer, violation.half, violation.request) == (int(prefix[20]), 1, "V", hit.rid)


def test_each_damaged_slot_is_reported_once_and_then_counted():
    engine = Engine()
    request = engine.request(30)
    engine.prefill(request)
    engine.pool.k_buffer[0][engine.slots_of(request)[3]] += 1
    engine.settle_scrub()
    engine.settle_scrub()

    assert len(engine.violations) == 1
    assert engine.reporter.counts["content"] >= 3


def test_damage_in_a_freed_slot_is_nobodys_business():
    engine = Engine()
    request = engine.request(30)
    engine.prefill(request)
    slots = engine.slots_of(request)
    engine.finish(request)
    engine.pool.k_buffer[0][slots] += 1
    engine.settle_scrub()

    assert engine.violations == []


def test_partial_content_reads_the_first_sixteen_bytes_only():
    engine = Engine(content="partial")
    request = engine.request(30)
    engine.prefill(request)
    one, other = engine.slots_of(request)[[3, 4]]
    engine.pool.k_buffer[0][one, 0, 7] += 1  # byte 14
    engine.pool.k_buffer[0][other, 0, 8] += 1  # byte 16
    engine.settle_scrub()

    assert [v.slot for v in engine.violations] == [int(one)]


def test_float8_rows_are_covered():
    engine = Engine(dtype=torch.float8_e4m3fn)
    request = engine.request(30)
    engine.prefill(request)
    engine.settle_scrub()
    assert engine.violations == []
    slot = int(engine.slots_of(request)[3])
    engine.pool.v_buffer[2][slot, 0, 0] ^= 64
    engine.settle_scrub()

    assert [(v.slot, v.layer, v.half) for v in engine.violations] == [(slot, 2, "V")]


def test_without_content_nothing_is_folded():
    engine = Engine(checks=("chain",))

    assert engine.guard.scrubber is None
    assert engine.guard.pool.table.sources == ()


# --- policy and bounds ----------------------------------------------------------------------------------------------------


def test_raise_stops_with_the_violation_in_the_message():
    engine = Engine(mode="raise")
    request = engine.request(30)
    engine.prefill(request)
    engine.rows.req_to_token[request.req_pool_idx, 5] = 0
    with pytest.raises(CorruptionError, match=r"chain/slot_range in slot 0 .* position 5"):
        engine.decode(request)


def test_a_burst_is_described_up_to_a_limit_and_counted_beyond():
    engine = Engine(size=2000)
    requests = [engine.request(200) for _ in range(3)]
    engine.prefill(*requests)
    engine.rows.req_to_token[:, :200] = 0
    engine.decode(*requests)

    assert engine.reporter.counts["chain"] == 256
    assert engine.reporter.counts["unlisted"] == 600 + 3 - 256  # every position, and three end points
    assert len(engine.violations) == 2  # two requests have room in the buffer: one report each


@pytest.mark.parametrize(("size", "layers", "heads", "head_dim"), [(4096, 4, 2, 32), (4096, 12, 12, 64), (512, 3, 2, 16)])
def test_everything_resident_stays_within_64_bytes_a_slot(size, layers, heads, head_dim):
    engine = Engine(size=size, layers=layers, heads=heads, head_dim=head_dim)

    assert engine.guard.resident_bytes / engine.guard.pool.slot_count <= 64
