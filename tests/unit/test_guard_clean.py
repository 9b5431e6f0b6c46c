"""The guard (clean) on the real pool, allocator, request table, Req and ForwardBatch of SGLang."""

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from kvcanary_plugin.config import CHECKS
from tests.engine import Engine


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48])
def test_prefill_and_decode_are_silent(page_size, length):
    engine = Engine(page_size=page_size, checks=CHECKS)
    one, other = engine.request(length), engine.request(33)
    engine.prefill(one, other)
    engine.run(one, other, steps=20)
    engine.settle_scrub()

    assert engine.violations == []
    assert engine.reporter.counts == {}


def test_chunked_prefill_is_silent(page_size):
    engine = Engine(page_size=page_size, checks=CHECKS)
    request = engine.request(70)
    for end in (32, 64, 70):
        engine.prefill(request, upto=end)
    engine.run(request)

    assert engine.violations == []


def test_shared_prefix_is_silent(page_size):
    engine = Engine(page_size=page_size, checks=CHECKS)
    first = engine.request(40)
    engine.prefill(first)
    engine.run(first)
    prefix = engine.finish(first, keep=32)
    hits = [engine.request(tokens=[*first.origin_input_ids[:32], *range(extra)]) for extra in (1, 7)]
    engine.prefill(*hits, prefix=prefix)
    engine.run(*hits)

    assert engine.violations == []


def test_retraction_and_reuse_of_slots_are_silent(page_size):
    engine = Engine(page_size=page_size, size=96, checks=CHECKS)
    for _ in range(6):
        request = engine.request(30)
        engine.prefill(request)
        engine.run(request)
        engine.finish(request)  # retracted: slots and row are gone, the tokens stay
        request.kv_committed_len = 0
        engine.prefill(request)
        engine.run(request)
        engine.finish(request)
    engine.settle_scrub()

    assert engine.violations == []


def test_mixed_batch_is_silent(page_size):
    engine = Engine(page_size=page_size, checks=CHECKS)
    running, new = engine.request(20), engine.request(25)
    engine.prefill(running)
    engine.rows.alloc([new])
    running.output_ids.append(7)
    engine.forward([new, running], [0, 20], [25, 21], ForwardMode.MIXED)
    engine.run(new, running)

    assert engine.violations == []


def test_flush_is_silent_and_forgets(page_size):
    engine = Engine(page_size=page_size, checks=CHECKS)
    request = engine.request(20)
    engine.prefill(request)
    slots = engine.slots_of(request)
    engine.guard.traffic.release_all()
    engine.allocator.clear()
    for buffer in engine.pool.k_buffer:
        buffer.zero_()  # as releasing and resuming memory does
    engine.settle_scrub()

    assert engine.violations == []
    assert not engine.guard.records.hot[slots, 3].bitwise_and(1 << 60).any()


def test_same_request_id_used_twice_is_silent():
    engine = Engine(checks=CHECKS)
    for length in (20, 30):
        request = engine.request(length)
        request.rid = "same"
        engine.prefill(request)
        engine.run(request)
        engine.finish(request)

    assert engine.violations == []


def test_requests_of_different_namespaces_are_silent():
    engine = Engine(checks=CHECKS)
    tokens = list(range(20))
    for key in (None, "tenant-a", "tenant-b"):
        request = engine.request(tokens=tokens, extra_key=key)
        engine.prefill(request)
        engine.run(request)

    assert engine.violations == []


def test_a_key_that_no_encoding_takes_is_silent():
    engine = Engine(checks=CHECKS)
    request = engine.request(20, extra_key="\ud800x")
    engine.prefill(request)
    engine.run(request)

    assert engine.violations == []
