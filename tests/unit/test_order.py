"""The check ``order`` as the guard uses it. A CPU has no streams; the tickets are kept there all the same, then taken.

What the device does with two streams is shown in ``tests/kernels/test_order.py``, on a GPU.
"""

from __future__ import annotations

import pytest

from kvcanary_plugin.config import CHECKS
from kvcanary_plugin.errors import ConfigError
from kvcanary_plugin.faults.injector import Injector
from kvcanary_plugin.faults.order import _without_wait
from kvcanary_plugin.runtime.order import Order
from tests.engine import Engine
from tests.unit.quarantined import QuarantinedEngine


@pytest.fixture(autouse=True)
def _with_tickets(monkeypatch):
    monkeypatch.setattr(Order, "is_needed", staticmethod(lambda device: True))


def drop_batch(order, monkeypatch):
    """The forward's stream has not waited for the scheduler's, which is late."""
    monkeypatch.setattr(order, "note_batch", lambda step: None)


def drop_forward(order, monkeypatch):
    """The forward ahead is still under way, on another stream."""
    monkeypatch.setattr(order, "note_forward", lambda batch: None)


def test_it_is_in_force_and_silent_on_traffic():
    engine = Engine(checks=CHECKS)
    assert "order" in engine.guard.checks
    first, second = engine.request(9), engine.request(14)
    engine.prefill(first)
    engine.prefill(second, upto=6)
    engine.prefill(second)
    engine.run(first, second, steps=6)
    engine.finish(first)
    engine.settle_scrub()
    engine.run(second)
    assert engine.violations == []


@pytest.mark.parametrize(("drop", "kind"), [(drop_batch, "unordered_batch"), (drop_forward, "unordered_forward")])
def test_a_missing_ticket_is_named_with_its_step(drop, kind, monkeypatch):
    engine = Engine(checks=CHECKS)
    request = engine.request(9)
    engine.prefill(request)
    drop(engine.guard._order, monkeypatch)
    engine.decode(request)
    if drop is drop_forward:
        assert engine.violations == []
        engine.decode(request)
    [violation] = engine.violations
    assert (violation.check, violation.kind, violation.step) == ("order", kind, engine.guard.forwards)
    due = engine.guard.forwards - (drop is drop_forward)
    assert violation.evidence == (f"step {due} was due on the device, and it had come to step {due - 1}",)


@pytest.mark.parametrize("is_damaged", [True, False])
def test_quarantine_ends_every_request_of_the_forward(is_damaged, monkeypatch):
    engine = QuarantinedEngine(checks=CHECKS)
    first, second, other = engine.request(9), engine.request(14), engine.request(11)
    engine.start(first, second, other)
    if is_damaged:
        drop_batch(engine.guard._order, monkeypatch)
    engine.decode(first, second)
    for request in (first, second):
        assert (request.to_finish is not None) == is_damaged
    if is_damaged:
        assert "check order" in first.to_finish.message
        assert "slot -1" not in first.to_finish.message


def test_without_the_check_there_are_no_tickets():
    guard = Engine(checks=("chain", "content")).guard
    assert guard._order is None
    with pytest.raises(ConfigError, match="the check that finds it, order, is off"):
        Injector.parse("drop_wait@3").check_against(guard.pool.table, guard.settings.possible)


class Stream:
    """Remembers for which streams it was told to wait."""

    def __init__(self):
        self.waited = []

    def wait_stream(self, stream):
        self.waited.append(stream)


def test_the_fault_drops_the_waits_for_one_stream_and_puts_them_back():
    before = vars(Stream)["wait_stream"]
    late, other, forward = Stream(), Stream(), Stream()
    restore = _without_wait(Stream, late)
    forward.wait_stream(late)
    forward.wait_stream(other)
    assert forward.waited == [other]
    restore()
    forward.wait_stream(late)
    assert forward.waited == [other, late]
    assert vars(Stream)["wait_stream"] is before
