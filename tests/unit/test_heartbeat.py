"""A sign of life, while the guard is there and when it is gone."""

from __future__ import annotations

from typing import Any

import pytest

from kvcanary_plugin.config import Config
from kvcanary_plugin.runtime import heartbeat
from kvcanary_plugin.runtime.session import Session
from tests.unit.sessions import Served


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [heartbeat.time.monotonic()]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    return now


def beats(engine: Served) -> list[dict[str, Any]]:
    return [fields for name, fields in engine.reporter.events if name == "heartbeat"]


def test_a_beat_says_what_was_done(clock: list[float]):
    engine = Served()
    request = engine.request(30)
    engine.prefill(request)
    engine.run(request, steps=4)
    assert beats(engine) == []
    clock[0] += heartbeat.PERIOD_SECONDS
    engine.decode(request)
    engine.decode(request)
    (beat,) = beats(engine)
    assert (beat["state"], beat["mode"], beat["forwards"]) == ("guarding", "log", 6)
    assert beat["verified"] == sum(range(30, 35))
    assert beat["stored"] == 30 + 5
    assert beat["folded"] == 6 * engine.guard.scrubber.slots_a_forward
    assert beat["folded_bytes"] == beat["folded"] * engine.guard.pool.table.bytes_per_slot
    assert beat["oldest_unverified_seconds"] == pytest.approx(heartbeat.PERIOD_SECONDS)
    assert beat["serving_seconds"] > 0
    assert beat["violations"] == {}


def test_folded_is_what_was_gone_over_in_all_passes(monkeypatch: pytest.MonkeyPatch):
    engine = Served()
    scrubber, counted = engine.guard.scrubber, []
    next_range = scrubber.next_range

    def counting(seconds: float = 0.0, **how: bool) -> tuple[int, int]:
        start, count = next_range(seconds, **how)
        counted.append(count)
        return start, count

    monkeypatch.setattr(scrubber, "next_range", counting)
    engine.settle_scrub()
    engine.session.idle()
    (sweep,) = engine.guard.figures.sweeps
    assert sweep.passes >= 2
    assert sweep.folded == sum(counted)


def test_an_idle_server_beats_too_and_its_time_is_counted_apart(clock: list[float]):
    engine = Served()
    engine.prefill(request := engine.request(30))
    engine.decode(request)
    folded = engine.guard.scrubber.folded
    served = engine.session.heartbeat.serving_seconds
    clock[0] += heartbeat.PERIOD_SECONDS
    engine.session.idle()
    (beat,) = beats(engine)
    assert beat["folded"] == engine.guard.scrubber.folded > folded
    assert engine.session.heartbeat.serving_seconds == served
    assert engine.session.heartbeat.idle_seconds > 0


def test_without_content_there_is_no_pass_to_tell_of(clock: list[float]):
    engine = Served(checks=("chain",))
    clock[0] += heartbeat.PERIOD_SECONDS
    engine.prefill(engine.request(3))
    (beat,) = beats(engine)
    assert "passes" not in beat


def test_a_server_that_has_lost_its_guard_says_so_at_once_and_goes_on_saying_so(clock: list[float]):
    engine = Served()
    engine.prefill(engine.request(30))
    engine.session.announce(lambda batch: 1 / 0, None)
    assert engine.session.guard is None
    engine.session.settle(object())
    clock[0] += heartbeat.PERIOD_SECONDS
    engine.session.idle()
    first, second = beats(engine)
    assert first["state"] == second["state"] == "detached"
    assert first["stored"] == second["stored"] == 30
    aged = second["oldest_unverified_seconds"] - first["oldest_unverified_seconds"]
    assert aged == pytest.approx(heartbeat.PERIOD_SECONDS)


def test_a_server_that_was_never_guarded_says_so(clock: list[float]):
    engine = Served()
    session = Session(Config(mode="log", allow_uncovered=True))
    session.reporter = engine.reporter
    session.attach(engine.runner(), ["this is not covered"], rank=0)
    clock[0] += heartbeat.PERIOD_SECONDS
    session.idle()
    (beat,) = beats(engine)
    assert beat["state"] == "uncovered"


def test_a_heartbeat_that_fails_leaves_the_guard_alone(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    engine = Served(mode="raise")
    monkeypatch.setattr(heartbeat.Heartbeat, "look", lambda self: 1 / 0)
    for _ in range(2):
        clock[0] += heartbeat.PERIOD_SECONDS
        engine.prefill(engine.request(3))
    assert engine.session.state == "guarding"
    assert beats(engine) == []
    assert caplog.text.count("the heartbeat failed") == 1


def test_a_call_within_a_call_is_timed_once(monkeypatch: pytest.MonkeyPatch):
    engine = Served()
    session, now = engine.session, [0.0]
    monkeypatch.setattr(heartbeat.time, "perf_counter", lambda: now[0])

    def inner(_: Any) -> None:
        now[0] += 2

    def outer(_: Any) -> None:
        now[0] += 1
        session.call(inner)

    session.call(outer)
    session.call(inner)
    assert session.heartbeat.serving_seconds == 5
