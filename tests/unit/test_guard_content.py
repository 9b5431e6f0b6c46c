"""The guard (content) on the real pool, allocator, request table, Req and ForwardBatch of SGLang."""

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tests.engine import Engine


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


def test_damaged_prefix_of_a_retracted_request_is_found_when_it_comes_back_to_its_row():
    engine = Engine(size=20000)  # the rotating pass is far away
    request = engine.request(40)
    engine.prefill(request)
    row = request.req_pool_idx
    prefix = engine.finish(request, keep=40)
    engine.pool.v_buffer[1].view(torch.int16)[prefix[20], 0, 0] ^= 1
    request.reset_for_retract()
    request.output_ids.append(7)
    engine.rows.free_slots.remove(row)
    engine.rows.free_slots.insert(0, row)
    engine.prefill(request, prefix=prefix)

    assert request.req_pool_idx == row
    assert [(v.slot, v.phase) for v in engine.violations if v.phase == "start"] == [(int(prefix[20]), "start")]
