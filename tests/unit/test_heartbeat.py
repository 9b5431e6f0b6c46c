from __future__ import annotations

import pytest

from kvcanary_plugin.runtime import heartbeat
from tests.engine import Engine


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [heartbeat.time.monotonic()]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    return now


def beats(engine: Engine) -> list[dict]:
    return [fields for name, fields in engine.reporter.events if name == "heartbeat"]


def test_a_beat_says_what_was_done(clock: list[float]):
    engine = Engine()
    request = engine.request(30)
    engine.prefill(request)
    engine.run(request, steps=4)
    assert beats(engine) == []
    clock[0] += heartbeat.PERIOD_SECONDS
    engine.decode(request)
    engine.decode(request)
    (beat,) = beats(engine)
    assert (beat["state"], beat["forwards"]) == ("guarding", 6)
    assert beat["verified"] == sum(range(30, 35))
    assert beat["stored"] == 30 + 5
    assert beat["folded"] == 6 * engine.guard.scrubber.slots_a_forward
    assert beat["oldest_unverified_seconds"] > 0
    assert beat["violations"] == {}


def test_an_idle_server_beats_too(clock: list[float]):
    engine = Engine()
    engine.prefill(request := engine.request(30))
    engine.decode(request)
    folded = engine.guard.heartbeat.folded
    clock[0] += heartbeat.PERIOD_SECONDS
    engine.guard.idle()
    assert len(beats(engine)) == 1
    assert engine.guard.heartbeat.folded > folded


def test_without_content_there_is_no_pass_to_tell_of(clock: list[float]):
    engine = Engine(checks=("chain",))
    clock[0] += heartbeat.PERIOD_SECONDS
    engine.prefill(engine.request(3))
    (beat,) = beats(engine)
    assert "passes" not in beat
