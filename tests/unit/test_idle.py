"""An idle server folds its pool at full pace."""

from __future__ import annotations

import pytest
import torch

from kvcanary_plugin.errors import CorruptionError
from kvcanary_plugin.runtime import idle
from tests.engine import Engine


def cached(**options) -> tuple[Engine, torch.Tensor]:
    engine = Engine(**options)
    engine.prefill(request := engine.request(48))
    engine.run(request, steps=5)
    return engine, engine.finish(request, keep=48)


def rest(engine: Engine) -> int:
    """Be idle until there is nothing left to fold; returns the pieces that took."""
    pieces = -1
    while pieces != engine.guard.passes.idle.pieces:
        pieces = engine.guard.passes.idle.pieces
        engine.guard.idle()
    return pieces


@pytest.mark.parametrize("page_size", [1, 16])
def test_damage_is_found_without_any_forward(page_size: int):
    engine, slots = cached(page_size=page_size)
    engine.pool.v_buffer[2][slots[31], 1, 3] += 1
    steps = engine.guard.forwards
    rest(engine)
    (violation,) = engine.violations
    assert (violation.check, violation.slot, violation.layer, violation.half) == ("content", int(slots[31]), 2, "V")
    assert engine.guard.forwards == steps


def test_a_clean_pool_is_silent_and_then_left_alone(monkeypatch: pytest.MonkeyPatch):
    engine, _ = cached()
    assert rest(engine) >= 1
    assert engine.guard.scrubber.passes >= 1
    assert engine.violations == []
    before = engine.guard.passes.idle.pieces
    engine.guard.idle()
    assert engine.guard.passes.idle.pieces == before
    now = idle.time.monotonic() + idle.PASS_SECONDS
    monkeypatch.setattr(idle.time, "monotonic", lambda: now)
    engine.guard.idle()
    assert engine.guard.passes.idle.pieces == before + 1


def test_a_forward_ends_the_rest():
    engine, _ = cached()
    rest(engine)
    before = engine.guard.passes.idle.pieces
    engine.prefill(engine.request(10))
    engine.guard.idle()
    assert engine.guard.passes.idle.pieces == before + 1


def test_slots_that_were_freed_before_are_not_folded():
    engine, slots = cached()
    engine.guard.traffic.release(slots)
    engine.allocator.free(slots)
    engine.pool.k_buffer[0][slots] = 0
    rest(engine)
    assert engine.violations == []


def test_raise_stops_an_idle_server_too():
    engine, slots = cached(mode="raise")
    engine.pool.k_buffer[0][slots[3]] += 1
    with pytest.raises(CorruptionError):
        rest(engine)


def test_without_content_nothing_is_done():
    engine = Engine(checks=("chain",))
    engine.guard.idle()
    assert engine.guard.passes.idle.pieces == 0
