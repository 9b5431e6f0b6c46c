"""A server that gives the memory of its KV back and takes it again: nothing of it is touched meanwhile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvcanary_plugin.config import CHECKS
from patches.memory import concerns_kv, declare_patches
from tests.unit.sessions import Served


@pytest.fixture(params=[1, 4], ids=["page1", "page4"])
def engine(request):
    engine = Served(checks=CHECKS, scrub_budget=1.0, page_size=request.param)
    engine.patches = {patch.attribute: patch.wrapper for patch in declare_patches(engine.session)}
    return engine


def serve(engine, length=12):
    request = engine.request(length)
    engine.prefill(request)
    engine.run(request, steps=3)
    return request


def release(engine, tags=None):
    """As SGLang does: the memory goes, then the cache is flushed."""

    def really_release(request):
        poison(engine)
        engine.flush()

    engine.patches["release_memory_occupation"](really_release, None, (SimpleNamespace(tags=tags),), {})


def resume(engine, tags=None):
    """The memory that comes back holds anything."""
    request = {"recv_req": SimpleNamespace(tags=tags)}
    engine.patches["resume_memory_occupation"](lambda recv_req: poison(engine), None, (), request)


def poison(engine):
    """What is read of memory that is not there, or that just came: anything."""
    for buffer in (*engine.pool.k_buffer, *engine.pool.v_buffer):
        buffer.view(torch.int16).random_(generator=engine.random)
    engine.rows.req_to_token.random_(generator=engine.random)


def test_nothing_is_reported_of_memory_that_comes_back_empty(engine):
    engine.finish(serve(engine))
    release(engine)
    assert engine.session.state == "released"
    for _ in range(50):
        engine.session.idle()
    resume(engine)
    assert engine.session.state == "guarding"
    engine.cover()
    serve(engine)
    engine.cover()
    assert engine.violations == []
    assert [name for name, _ in engine.reporter.events if name in ("released", "resumed")] == ["released", "resumed"]


def test_without_being_told_it_would_be(engine):
    serve(engine)
    poison(engine)
    engine.cover()
    assert engine.violations


def test_while_it_is_gone_no_row_is_folded(engine, monkeypatch):
    serve(engine)
    release(engine)
    monkeypatch.setattr(type(engine.unwrapped), "idle", lambda self: pytest.fail("the pool was looked at"))
    engine.session.idle()
    resume(engine)
    with pytest.raises(pytest.fail.Exception):
        engine.session.idle()


def test_the_guard_finds_damage_again_once_the_memory_is_back(engine):
    release(engine)
    resume(engine)
    request = serve(engine)
    slot = int(engine.rows.req_to_token[request.req_pool_idx, 4])
    engine.flip(slot)
    engine.cover()
    assert {(violation.check, violation.slot) for violation in engine.violations} == {("content", slot)}


def test_weights_alone_are_no_reason_to_look_away(engine):
    engine.patches["release_memory_occupation"](lambda _: None, None, (SimpleNamespace(tags=["weights"]),), {})
    assert engine.session.state == "guarding"


def test_weights_that_are_replaced_meanwhile_count(engine):
    release(engine)
    engine.session.replace_weights("2")
    resume(engine, ["kv_cache"])
    assert engine.unwrapped.truth.identities.weights == "2"


def test_it_may_be_given_back_twice(engine):
    release(engine, ["kv_cache"])
    release(engine)
    resume(engine)
    assert engine.session.state == "guarding"


def test_mode_off_goes_on_after_the_memory_is_back(engine):
    engine.set(mode="off")
    release(engine)
    assert engine.session.state == "released"
    resume(engine)
    assert engine.session.state == "paused"


@pytest.mark.parametrize(
    ("tags", "expected"), [(None, True), ([], True), (["weights"], False), (["weights", "kv_cache"], True)]
)
def test_tags_say_whether_it_is_about_kv(tags, expected):
    assert concerns_kv((SimpleNamespace(tags=tags),), {}) is expected
