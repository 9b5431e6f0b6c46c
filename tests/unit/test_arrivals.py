"""When a request whose KV has come may go on: SGLang's receivers say it, and ours is the word in between."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.base import KVPoll

from kvcanary_plugin.config import Config
from kvcanary_plugin.errors import CorruptionError
from kvcanary_plugin.patches.arrivals import declare_patches
from kvcanary_plugin.patches.disaggregation import SINCE, UNTIL
from kvcanary_plugin.pool_patcher.patch import PatchSet
from kvcanary_plugin.runtime.adoption import make_records
from kvcanary_plugin.runtime.arrivals import MAX_UNDER_WAY
from kvcanary_plugin.runtime.session import Session
from kvcanary_plugin.versions import installed_sglang
from tests.engine import Engine

pytestmark = pytest.mark.skipif(installed_sglang() != "0.5.15", reason="covered for SGLang 0.5.15")
ROOM, TOKENS = 7, 12


class Event:
    """That of a device which takes its time."""

    def __init__(self):
        self.has_come = False

    def record(self):
        self.has_come = False

    def query(self):
        return self.has_come

    def synchronize(self):
        assert self.has_come, "nobody waits"


class Decode:
    """A decode engine, SGLang's receivers, and a session between them."""

    def __init__(self, mode="log", **options):
        self.engine = Engine(mode=mode, **options)
        self.engine.guard.open_handover(1, receives=True)
        self.session = Session(Config(mode=mode))
        self.session.reporter = self.engine.reporter
        self.session.guard = self.engine.guard
        self.arrivals = self.engine.guard.traffic.arrivals
        self.manager = SimpleNamespace(request_status={}, addr_to_rooms_tracker={"prefill:1": set()})
        for table in ("required_prefill_response_num_table", "prefill_response_tracker"):
            setattr(self.manager, table, {})
        self.manager.check_status = lambda room: self.manager.request_status[room]
        self.manager.update_status = self.manager.request_status.__setitem__

    def await_kv(self, room=ROOM):
        """A request in SGLang's queue, with the slots to which its KV comes."""
        from sglang.srt.disaggregation.decode import DecodeTransferQueue
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVReceiver

        request = self.engine.request(TOKENS)
        self.engine.rows.alloc([request])
        slots = self.engine.allocator.alloc(TOKENS)
        self.engine.rows.req_to_token[request.req_pool_idx, :TOKENS] = slots.int()
        request.kv_committed_len, request.bootstrap_room, request.bootstrap_host = TOKENS, room, "127.0.0.1"
        self.manager.get_session_id = lambda: "decode:1"
        receiver = MooncakeKVReceiver(self.manager, "prefill:1", room)
        queue = object.__new__(DecodeTransferQueue)
        queue.queue, queue.enable_staging = [], False
        queue.extend([SimpleNamespace(req=request, kv_receiver=receiver)])
        return SimpleNamespace(request=request, slots=slots, receiver=receiver)

    def send(self, awaited, room=ROOM):
        """All of it comes: the KV of a prefill server and its records, made here of the same tokens."""
        handover = self.engine.guard.traffic.handover
        self.engine.store(awaited.slots)
        space, anchor = self.engine.guard.spaces[0], self.engine.guard.truth.anchor_of(awaited.request)
        made = make_records(awaited.request, anchor, np.arange(TOKENS), None)
        handover.hot[awaited.slots] = torch.from_numpy(made)
        space._backend.seal_slots(records=handover.hot, table=space.slots.table, slots=awaited.slots)
        self.manager.update_status(room, KVPoll.Success)

    def slow_down(self):
        """Verdicts come when the events that are returned say so."""
        events = []
        for step in self.arrivals._steps:
            step._copied = Event()
            step._copied.has_come = True  # nothing was asked of it yet
            events.append(step._copied)
        return events


@pytest.fixture
def make():
    """Makes a decode engine with our patches in force."""
    installed = []

    def make(*args, **options):
        decode = Decode(*args, **options)
        installed.append(PatchSet(declare_patches(decode.session, SINCE, UNTIL)))
        installed[-1].install(installed_sglang())
        return decode

    yield make
    for patches in installed:
        patches.uninstall()


def flip(decode, awaited, place=5):
    decode.engine.pool.v_buffer[1].view(torch.int16)[awaited.slots[place], 0, 0] ^= 4


def finish(events):
    """The device has done all that was asked of it."""
    for event in events:
        event.has_come = True


def test_what_is_whole_goes_on_at_once(make):
    decode = make()
    awaited = decode.await_kv()
    assert awaited.receiver.poll() == KVPoll.Bootstrapping
    decode.send(awaited)
    assert awaited.receiver.poll() == KVPoll.Success
    assert awaited.receiver.poll() == KVPoll.Success
    assert decode.engine.violations == []


def test_what_is_damaged_is_told_once_and_goes_on_in_log(make):
    decode = make()
    awaited = decode.await_kv()
    decode.send(awaited)
    flip(decode, awaited)
    assert [awaited.receiver.poll() for _ in range(3)] == [KVPoll.Success] * 3
    assert [(v.check, v.phase, v.position, v.layer, v.request) for v in decode.engine.violations] == [
        ("content", "arrival", 5, 1, awaited.request.rid)
    ]


def test_what_is_damaged_stops_the_server_in_raise(make):
    decode = make("raise")
    awaited = decode.await_kv()
    decode.send(awaited)
    flip(decode, awaited)
    with pytest.raises(CorruptionError, match="received for"):
        awaited.receiver.poll()


def test_it_is_under_way_while_it_is_compared(make):
    decode = make()
    events = decode.slow_down()
    awaited = decode.await_kv()
    decode.send(awaited)
    flip(decode, awaited)
    assert [awaited.receiver.poll() for _ in range(3)] == [KVPoll.Transferring] * 3
    assert decode.engine.violations == []
    finish(events)
    assert awaited.receiver.poll() == KVPoll.Success
    assert {violation.phase for violation in decode.engine.violations} == {"arrival"}


def test_what_was_given_up_meanwhile_is_not_told(make):
    """Its slots may be another's by now, so what the device has seen there says nothing."""
    decode = make()
    events = decode.slow_down()
    awaited = decode.await_kv()
    decode.send(awaited)
    flip(decode, awaited)
    assert awaited.receiver.poll() == KVPoll.Transferring
    awaited.receiver.clear()
    finish(events)
    assert decode.arrivals.settle(ROOM)
    again = decode.await_kv()
    decode.send(again)
    assert again.receiver.poll() == KVPoll.Transferring
    finish(events)
    assert again.receiver.poll() == KVPoll.Success
    assert decode.engine.violations == []


def test_more_than_there_is_room_for_take_turns(make):
    decode = make(size=1024)
    decode.engine.rows.free_slots = list(range(1, 17))
    events = decode.slow_down()
    awaited = [decode.await_kv(room) for room in range(3)]
    for place in range(2, MAX_UNDER_WAY):
        events[place].has_come = False
    for room, each in enumerate(awaited):
        decode.send(each, room)
        assert each.receiver.poll() == KVPoll.Transferring
    events[0].has_come = True
    assert awaited[0].receiver.poll() == KVPoll.Success
    awaited[0].receiver.clear()
    assert awaited[2].receiver.poll() == KVPoll.Transferring
    events[0].has_come = True
    assert awaited[2].receiver.poll() == KVPoll.Success


@pytest.mark.parametrize(("check", "is_found"), [("chain", False), ("content", True)])
def test_a_check_that_is_off_is_left_out(make, check, is_found):
    decode = make()
    decode.engine.guard.settings.set_checks([check])
    awaited = decode.await_kv()
    decode.send(awaited)
    flip(decode, awaited)
    assert awaited.receiver.poll() == KVPoll.Success
    assert bool(decode.engine.violations) is is_found


def test_the_first_forward_does_not_fold_it_again(make, monkeypatch):
    decode = make()
    awaited = decode.await_kv()
    decode.send(awaited)
    assert awaited.receiver.poll() == KVPoll.Success
    awaited.receiver.clear()
    decode.engine.guard.traffic.handover.take_over(awaited.request, awaited.slots)
    folded = []
    space = decode.engine.guard.spaces[0]
    monkeypatch.setattr(space, "check_slots", lambda slots, index: folded.append((slots, index)))
    decode.engine.run(awaited.request, steps=2)
    assert folded == []
    assert decode.engine.violations == []


def test_a_guard_that_has_detached_holds_nobody_back(make):
    decode = make()
    awaited = decode.await_kv()
    decode.send(awaited)
    decode.session.guard = None
    assert awaited.receiver.poll() == KVPoll.Success
