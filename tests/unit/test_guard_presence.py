"""presence: a forward must have stored K and V of every layer for every new token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvcanary_plugin.runtime.presence import LEARNING_FORWARDS
from tests.engine import Engine


@pytest.fixture(params=[1, 16], ids=["page1", "page16"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(page_size=request.param)


def learn(engine: Engine):
    request = engine.request(20)
    engine.prefill(request)
    engine.run(request, steps=LEARNING_FORWARDS)
    assert engine.guard.spaces[0].presence.learned is not None
    return request


def without(engine: Engine, layer: int, rows: slice = slice(None), heads: slice = slice(None), half: str = "KV"):
    """The model's store, but for ``layer`` only tokens ``rows`` are skipped, of them ``heads``, of them ``half``."""

    def store(slots: torch.Tensor) -> None:
        kept = [(buffer[layer].clone()) for buffer in (engine.pool.k_buffer, engine.pool.v_buffer)]
        Engine.store(engine, slots)
        for buffer, name, before in zip((engine.pool.k_buffer, engine.pool.v_buffer), "KV", kept, strict=True):
            if name in half:
                buffer[layer][slots[rows], heads] = before[slots[rows], heads]

    return store


def test_clean_forwards_are_silent(engine: Engine):
    request = learn(engine)
    other = engine.request(33)
    engine.prefill(other, upto=17)
    engine.prefill(other)
    engine.run(request, other, steps=20)
    assert engine.violations == []


@pytest.mark.parametrize("half", ["K", "V"])
def test_a_layer_that_was_not_stored_is_named(engine: Engine, half: str):
    learn(engine)
    engine.store = without(engine, 1, half=half)
    request = engine.request(9)
    engine.prefill(request)
    (violation,) = engine.violations
    assert (violation.check, violation.kind) == ("presence", "not_stored")
    assert (violation.layer, violation.half, violation.request) == (1, half, request.rid)
    assert violation.step == engine.guard.forwards
    assert violation.slot in engine.slots_of(request).tolist()
    assert engine.reporter.counts["presence"] == 9


def test_one_token_that_was_not_stored_is_named(engine: Engine):
    learn(engine)
    request = engine.request(9)
    engine.store = without(engine, 2, rows=slice(4, 5), half="V")
    engine.prefill(request)
    (violation,) = engine.violations
    slots = engine.slots_of(request).tolist()
    assert (violation.slot, violation.position, violation.layer, violation.half) == (slots[4], 4, 2, "V")


def test_a_decode_step_that_skips_a_layer_is_seen_in_that_step(engine: Engine):
    request = learn(engine)
    engine.store = without(engine, 0, half="K")
    engine.decode(request)
    (violation,) = engine.violations
    assert (violation.layer, violation.half, violation.step) == (0, "K", engine.guard.forwards)


def test_some_heads_only_is_a_part(engine: Engine):
    learn(engine)
    engine.store = without(engine, 1, heads=slice(1, 2), half="K")
    engine.prefill(engine.request(3))
    (violation,) = engine.violations
    assert violation.kind == "partly_stored"


def test_layers_that_are_never_stored_are_learned_said_once_and_silent(caplog: pytest.LogCaptureFixture):
    engine = Engine(layers=4)
    engine.pool.layer_num = 3  # the miniature model stores the first three
    request = learn(engine)
    (fields,) = [fields for name, fields in engine.reporter.events if name == "learned"]
    assert fields["unstored"] == ((3, "K"), (3, "V"))
    assert caplog.text.count("stored layer 3 K, layer 3 V") == 1
    engine.run(request, steps=5)
    assert engine.violations == []
    engine.store = without(engine, 2, half="V")
    engine.decode(request)
    assert [(v.check, v.layer) for v in engine.violations] == [("presence", 2)]


def test_a_layer_missing_from_some_of_the_first_forwards_is_not_learned_as_unstored():
    engine = Engine()
    request = engine.request(20)
    engine.store = without(engine, 1, half="K")
    engine.prefill(request)
    del engine.store
    engine.run(request, steps=LEARNING_FORWARDS)
    assert engine.guard.spaces[0].presence.learned.unstored == ()


def test_presence_alone_works_and_off_poisons_nothing():
    alone = Engine(checks=("presence",))
    learn(alone)
    alone.store = without(alone, 1, half="K")
    alone.prefill(alone.request(5))
    assert [v.check for v in alone.violations] == ["presence"]
    off = Engine(checks=("chain", "content"))
    request = off.request(4)
    off.store = lambda slots: None
    before = [buffer.clone() for buffer in off.pool.k_buffer]
    off.prefill(request)
    assert all(torch.equal(a, b) for a, b in zip(before, off.pool.k_buffer, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_lies_in_rows_before_the_forward_is_finite(dtype: torch.dtype):
    engine = Engine(dtype=dtype)
    learn(engine)
    seen = []

    def store(slots: torch.Tensor) -> None:
        seen.extend(buffer[slots].clone() for buffer in engine.pool.k_buffer + engine.pool.v_buffer)
        Engine.store(engine, slots)

    engine.store = store
    engine.prefill(engine.request(11))
    assert seen
    assert all(torch.isfinite(rows).all() for rows in seen)


def test_a_store_through_the_pool_leaves_no_poison():
    """The pool's own setter writes whole rows: the clean twin of every fault above."""
    engine = Engine(heads=3, head_dim=8)
    learn(engine)
    slots = engine.allocator.alloc(4)
    engine.guard.spaces[0].presence.chosen.fill_(1)
    k = torch.randn(4, 3, 8).to(engine.pool.dtype)
    engine.pool.set_kv_buffer(SimpleNamespace(layer_id=0), slots, k, k)
    engine.prefill(engine.request(30))
    assert engine.violations == []
