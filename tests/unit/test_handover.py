"""Records beside KV that goes from one pool to another, both of SGLang, which also says what is copied where."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.utils import is_mla_backend

from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.patches.disaggregation import HALVES
from tests.engine import Engine

TOKENS, ROOM = 12, 7


@pytest.fixture(params=["mha", "mla"])
def kind(request):
    return request.param


@pytest.fixture(params=[1, 4])
def pair(kind, request):
    """A prefill and a decode engine, their lists of buffers, and a request whose KV the first one has."""
    engines = [Engine(latent=kind == "mla", page_size=request.param) for _ in range(2)]
    for engine, receives in zip(engines, (False, True), strict=True):
        engine.guard.open_handover(1, receives=receives)
    halves = HALVES[type(engines[0].pool).__name__]
    lists = [engine.guard.traffic.handover.splice(engine.pool.get_contiguous_buf_infos(), halves) for engine in engines]
    sent = engines[0].request(TOKENS)
    engines[0].prefill(sent)
    return *engines, lists, sent


def transfer(decode, lists, source, target):
    """Have SGLang send the pages of slots ``source`` to those of slots ``target``; the wire is a copy."""

    def copy(_, blocks):
        for start, end, size in blocks:
            ctypes.memmove(end, start, size)
        return 0

    (of, _, items), (to, _, others) = lists
    assert items == others
    manager = object.__new__(MooncakeKVManager)
    manager.is_mla_backend, manager.enable_custom_mem_pool = is_mla_backend(decode.pool), False
    manager.kv_args = SimpleNamespace(prefill_start_layer=0)
    manager._transfer_data = copy
    pages = [np.array(slots[:: decode.page_size], dtype=np.int32) // decode.page_size for slots in (source, target)]
    assert manager._send_kvcache_generic("", of, to, items, *pages, None) == 0


def await_kv(decode, sent):
    """A request like ``sent``, whose KV another server has, and the slots for it."""
    request = decode.request(tokens=list(sent.origin_input_ids))
    decode.rows.alloc([request])
    target = decode.allocator.alloc(TOKENS)
    decode.rows.req_to_token[request.req_pool_idx, :TOKENS] = target.int()
    request.kv_committed_len = TOKENS
    decode.guard.traffic.arrivals.expect(ROOM, request)
    return request, target


def receive(decode, lists, sent, source, order=None):
    """The KV of ``sent`` comes to another server, which compares it and goes on with it."""
    request, target = await_kv(decode, sent)
    transfer(decode, lists, source, [target.tolist()[place] for place in order or range(TOKENS)])
    assert decode.guard.traffic.arrivals.settle(ROOM)
    assert decode.guard.forwards == 0
    found = list(decode.violations)
    assert {violation.phase for violation in found} <= {"arrival"}
    assert {violation.request for violation in found} <= {request.rid}
    assert {violation.writer for violation in found} <= {None}
    decode.guard.traffic.arrivals.forget(ROOM)
    decode.guard.traffic.handover.take_over(request, target)
    decode.run(request, steps=1)
    assert decode.violations == found, "the first forward finds the same, which is reported already"
    decode.run(request, steps=2)
    return target.tolist()


def slots_of(engine, request):
    return engine.rows.req_to_token[request.req_pool_idx, :TOKENS].tolist()


def test_both_halves_grow_alike(pair, kind):
    prefill, decode, lists, _ = pair
    for engine, (pointers, sizes, items) in zip((prefill, decode), lists, strict=True):
        plain, handover = engine.pool.get_contiguous_buf_infos()[0], engine.guard.traffic.handover
        middle = len(plain) // 2 if kind == "mha" else len(plain)
        assert len(pointers) == len(sizes) == len(items) == len(plain) + 2
        assert pointers[middle] == handover.hot.data_ptr()
        assert items[middle] + items[-1] == handover.bytes_per_token * engine.page_size == 40 * engine.page_size
        assert pointers[:middle] + pointers[middle + 1 : -1] == plain
    assert prefill.guard.traffic.handover.hot is prefill.guard.records.hot
    assert decode.guard.traffic.handover.hot is not decode.guard.records.hot
    assert prefill.guard.traffic.handover.tag == decode.guard.traffic.handover.tag


def test_what_arrives_whole_is_silent(pair):
    prefill, decode, lists, sent = pair
    target = receive(decode, lists, sent, slots_of(prefill, sent))
    assert decode.violations == []
    assert bool((decode.guard.records.hot[target, r.IDENTITY] & r.LIVE_BIT != 0).all())
    assert not decode.guard.traffic.handover.hot[target].any(), "the inbox is empty again"


@pytest.mark.parametrize("missing", [4, 8])
def test_a_transfer_that_ends_early_is_found_and_says_where(pair, missing):
    """Every position that has come is sound, and every one that has not is named: how many there are, tokens say."""
    prefill, decode, lists, sent = pair
    receive(decode, lists, sent, slots_of(prefill, sent)[:-missing], range(TOKENS - missing))
    assert {(v.check, v.kind, v.position) for v in decode.violations} == {
        ("chain", "dead_slot", position) for position in range(TOKENS - missing, TOKENS)
    }


def test_what_arrives_in_another_order_is_found(pair):
    prefill, decode, lists, sent = pair
    receive(decode, lists, sent, slots_of(prefill, sent), [*range(4, 8), *range(4), *range(8, TOKENS)])
    assert {v.check for v in decode.violations} == {"chain"}
    assert {v.position for v in decode.violations} == set(range(8))


def test_a_page_that_arrives_twice_in_the_slots_of_another_is_found(pair):
    prefill, decode, lists, sent = pair
    source = slots_of(prefill, sent)
    receive(decode, lists, sent, [*source, *source[4:8]], [*range(TOKENS), *range(4)])
    assert {v.check for v in decode.violations} == {"chain"}
    assert {v.position for v in decode.violations} == set(range(4))


def test_a_page_that_arrives_late_in_the_slots_of_somebody_else_is_found(pair):
    prefill, decode, lists, sent = pair
    decode.random.manual_seed(1)  # other KV than the prefill engine has
    running = decode.request(TOKENS)
    decode.prefill(running)
    decode.run(running, steps=2)
    assert decode.violations == []
    slots = slots_of(decode, running)[:4]
    transfer(decode, lists, slots_of(prefill, sent)[:4], slots)
    decode.settle_scrub()
    assert {(v.check, v.slot) for v in decode.violations} == {("content", slot) for slot in slots}


def test_another_request_in_its_place_is_found(pair):
    prefill, decode, lists, sent = pair
    other = prefill.request(TOKENS)
    prefill.prefill(other)
    receive(decode, lists, sent, slots_of(prefill, other))
    assert {v.check for v in decode.violations} == {"chain"}


def test_bytes_that_changed_on_the_way_are_found(pair, kind):
    prefill, decode, lists, sent = pair
    slot = slots_of(prefill, sent)[5]
    buffers = prefill.pool.v_buffer if kind == "mha" else prefill.pool.kv_buffer
    buffers[1].view(torch.int16)[slot, 0, 0] ^= 4
    receive(decode, lists, sent, slots_of(prefill, sent))
    half = {"mha": "V", "mla": "KV"}[kind]
    assert {(v.check, v.layer, v.half, v.position) for v in decode.violations} == {("content", 1, half, 5)}


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


@pytest.mark.parametrize(
    "name", ["drop_sent_page", "short_transfer", "wrong_slot", "swap_sent_pages", "swap_sent_rows"]
)
def test_every_fault_of_the_way_is_found_where_it_was_put_in(name):
    prefill, decode = Engine(page_size=4), Engine(page_size=4, inject=f"{name}@1")
    for engine, receives in ((prefill, False), (decode, True)):
        engine.guard.open_handover(1, receives=receives)
    lists = [
        engine.guard.traffic.handover.splice(engine.pool.get_contiguous_buf_infos(), 2) for engine in (prefill, decode)
    ]
    sent = prefill.request(TOKENS)
    prefill.prefill(sent)
    receive(decode, lists, sent, slots_of(prefill, sent))
    (injected,) = [fields for event, fields in decode.reporter.events if event == "injected"]
    assert injected["step"] == 1
    assert {(v.check, v.position, v.step) for v in decode.violations} == {
        (injected["check"], position, 1) for position in injected["positions"]
    }
