"""Records beside KV that goes from one pool to another, both of SGLang, copied page by page as transports do."""

import ctypes

import pytest
import torch

from kvcanary_plugin.kernels import record as r
from tests.engine import Engine

TOKENS = 12


@pytest.fixture
def pair():
    """A prefill and a decode engine, their lists of buffers, and a request whose KV the first one has."""
    engines = Engine(), Engine()
    for engine, receives in zip(engines, (False, True), strict=True):
        engine.guard.traffic.open_handover(1, receives=receives)
    lists = [engine.guard.traffic.handover.splice(engine.pool.get_contiguous_buf_infos(), 2) for engine in engines]
    sent = engines[0].request(TOKENS)
    engines[0].prefill(sent)
    return *engines, lists, sent


def transfer(lists, source, target):
    """Copy the registered bytes of slots ``source`` to slots ``target``."""
    (of, _, items), (to, _, others) = lists
    assert items == others
    for start, end, size in zip(of, to, items, strict=True):
        for here, there in zip(source, target, strict=True):
            ctypes.memmove(end + there * size, start + here * size, size)


def receive(decode, lists, sent, source, order=None):
    """The KV of ``sent`` comes to another server, which goes on with it."""
    request = decode.request(tokens=list(sent.origin_input_ids))
    decode.rows.alloc([request])
    target = decode.allocator.alloc(TOKENS)
    decode.rows.req_to_token[request.req_pool_idx, :TOKENS] = target.int()
    transfer(lists, source, [target.tolist()[place] for place in order or range(TOKENS)])
    decode.guard.traffic.handover.take_over(request, target)
    request.kv_committed_len = TOKENS
    decode.run(request, steps=3)
    return target.tolist()


def slots_of(engine, request):
    return engine.rows.req_to_token[request.req_pool_idx, :TOKENS].tolist()


def test_both_halves_grow_alike(pair):
    prefill, decode, lists, _ = pair
    plain = prefill.pool.get_contiguous_buf_infos()
    layers = len(plain[0]) // 2
    for engine, (pointers, sizes, items) in zip((prefill, decode), lists, strict=True):
        assert len(pointers) == len(sizes) == len(items) == 2 * layers + 2
        handover = engine.guard.traffic.handover
        assert pointers[layers] == handover.hot.data_ptr()
        assert items[layers] + items[-1] == handover.bytes_per_token == 40
        assert pointers[:layers] + pointers[layers + 1 : -1] == engine.pool.get_contiguous_buf_infos()[0]
    assert prefill.guard.traffic.handover.hot is prefill.guard.records.hot
    assert decode.guard.traffic.handover.hot is not decode.guard.records.hot
    assert prefill.guard.traffic.handover.tag == decode.guard.traffic.handover.tag


def test_what_arrives_whole_is_silent(pair):
    prefill, decode, lists, sent = pair
    target = receive(decode, lists, sent, slots_of(prefill, sent))
    assert decode.violations == []
    assert bool((decode.guard.records.hot[target, r.IDENTITY] & r.LIVE_BIT != 0).all())
    assert not decode.guard.traffic.handover.hot[target].any(), "the inbox is empty again"


def test_what_did_not_arrive_is_found(pair):
    prefill, decode, lists, sent = pair
    receive(decode, lists, sent, slots_of(prefill, sent)[:-1], range(TOKENS - 1))
    assert {(v.check, v.kind, v.position) for v in decode.violations} == {("chain", "dead_slot", TOKENS - 1)}


def test_what_arrives_in_another_order_is_found(pair):
    prefill, decode, lists, sent = pair
    receive(decode, lists, sent, slots_of(prefill, sent), [1, 0, *range(2, TOKENS)])
    assert {(v.check, v.position) for v in decode.violations} == {("chain", 0), ("chain", 1)}


def test_another_request_in_its_place_is_found(pair):
    prefill, decode, lists, sent = pair
    other = prefill.request(TOKENS)
    prefill.prefill(other)
    receive(decode, lists, sent, slots_of(prefill, other))
    assert {v.check for v in decode.violations} == {"chain"}


def test_bytes_that_changed_on_the_way_are_found(pair):
    prefill, decode, lists, sent = pair
    slot = slots_of(prefill, sent)[5]
    prefill.pool.v_buffer[1].view(torch.int16)[slot, 0, 0] ^= 4
    receive(decode, lists, sent, slots_of(prefill, sent))
    assert {(v.check, v.layer, v.half, v.position) for v in decode.violations} == {("content", 1, "V", 5)}


def test_a_request_without_a_transfer_goes_by_its_tokens(pair):
    _, decode, _, _ = pair
    request = decode.request(TOKENS)
    decode.rows.alloc([request])
    slots = decode.allocator.alloc(TOKENS)
    decode.rows.req_to_token[request.req_pool_idx, :TOKENS] = slots.int()
    decode.guard.traffic.handover.make_up(request, slots)
    request.kv_committed_len = TOKENS
    decode.run(request, steps=3)
    assert decode.violations == []
