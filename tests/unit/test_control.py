"""Changes to a running guard: each check, mode and budget does what it says, and going back works."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from kvcanary_plugin.config import CHECKS
from kvcanary_plugin.errors import ConfigError, CorruptionError
from kvcanary_plugin.runtime.control import Change, parse_change
from kvcanary_plugin.runtime.scrubber import CALIBRATION_FORWARDS, Scrubber
from tests.unit.sessions import Served


class SessionEngine(Served):
    """With a pass that may take all the time it wants."""

    def __init__(self, mode="log", **options):
        super().__init__(mode=mode, scrub_budget=1.0, **options)


@pytest.fixture(params=[1, 4], ids=["page1", "page4"])
def engine(request):
    return SessionEngine(page_size=request.param)


def running(engine, length=12):
    request = engine.request(length)
    engine.prefill(request)
    engine.run(request, steps=3)
    return request


# -- the way there


def test_a_change_comes_back_from_the_name_that_carries_it():
    change = Change("a&b=c %", "raise", ("chain", "content"), 0.0125, True)
    assert parse_change(change.to_key()) == change
    assert parse_change(Change().to_key()) == Change()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("mode=loud", "'loud' is not one of off, log, raise, quarantine"),
        ("checks=chain,smell", "names 'smell'"),
        ("scrub_budget=2", "above 0 and at most 1"),
        ("scrub_budget=nan", "above 0 and at most 1"),
        ("inject=flip_running@1", "cannot be changed in a running server; what can is mode, checks, scrub_budget"),
        ("log=/etc/passwd", "cannot be changed in a running server"),
        ("hf3fs=/tmp", "cannot be changed in a running server"),
        ("audit=yes", "cannot be changed in a running server"),
        ("mode=log&mode=raise", "mode is given twice"),
    ],
)
def test_what_cannot_be_changed_is_refused_as_a_whole(engine, text, why):
    before = {key: value for key, value in engine.state.items() if key[:11] != "last_change"}
    others = "" if text.startswith("scrub_budget") else "&scrub_budget=0.5"
    assert not engine.session.control.apply(f"kvcanary?id=x{others}&{text}")
    after = engine.state
    assert why in after.pop("last_change")["why"]
    after.pop("last_changes")
    assert {key: value for key, value in after.items() if key[:6] != "oldest"} == {
        key: value for key, value in before.items() if key[:6] != "oldest"
    }
    with pytest.raises(ConfigError):
        parse_change(text)


def test_what_this_server_does_not_have_is_refused():
    engine = SessionEngine(checks=("chain", "presence"))
    control = engine.session.control
    assert not control.apply("kvcanary?id=1&checks=chain,content")
    assert "content cannot be switched on in this server, which was started with chain" in control._lasts[-1]["why"]
    assert not control.apply("kvcanary?id=2&checks=identity")
    assert not control.apply("kvcanary?id=3&audit=1")
    assert "needs the check content" in control._lasts[-1]["why"]
    assert not control.apply("kvcanary?id=4&mode=quarantine")
    assert "start it with --kvcanary quarantine" in control._lasts[-1]["why"]
    engine.session.guard = None
    assert not control.apply("kvcanary?id=5&mode=raise")
    assert control._lasts[-1] == {
        "id": "5",
        "accepted": False,
        "why": "kvcanary: this server is detached; there is no guard to change",
    }


def test_the_state_says_what_is_going_on(engine):
    running(engine)
    engine.set(scrub_budget=0.25)
    state = engine.state
    assert state["schema"] == 1
    assert (state["state"], state["mode"], state["scrub_budget"]) == ("guarding", "log", 0.25)
    assert state["forwards"] == 4
    assert state["verified"] == 12 + 13 + 14
    assert state["stored"] == 15
    assert state["checks"] == ["chain", "content", "presence", "identity"]
    assert state["last_change"] == {"id": "i", "accepted": True, "why": ""}
    assert engine.reporter.events[-1][0] == "changed"


# -- checks


def damage_chain(engine, request):
    engine.rows.req_to_token[request.req_pool_idx, 2:4] = engine.rows.req_to_token[request.req_pool_idx, [3, 2]]


def damage_content(engine, request):
    engine.flip(int(engine.slots_of(request)[2]))
    engine.cover()


def damage_presence(engine, request):
    store, engine.store = engine.store, lambda slots: None
    engine.decode(request)
    engine.store = store


def damage_identity(engine, request):
    engine.session.replace_weights("2")
    other = engine.request(tokens=[*request.origin_input_ids, 5])
    slots = engine.slots_of(request)[:12]
    engine.prefill(other, prefix=slots)


DAMAGE = {
    "chain": damage_chain,
    "content": damage_content,
    "presence": damage_presence,
    "identity": damage_identity,
}


@pytest.mark.parametrize("check", DAMAGE)
@pytest.mark.parametrize("is_off", [True, False])
def test_a_check_that_is_off_says_nothing_and_the_others_go_on(engine, check, is_off):
    request = running(engine)
    engine.run(request, steps=10)  # presence has learned
    others = [name for name in engine.unwrapped.settings.possible if name != check]
    if check == "chain":
        others.remove("identity")
    if is_off:
        engine.set(checks=tuple(others))
        assert engine.state["checks"] == others
    DAMAGE[check](engine, request)
    engine.decode(request)
    found = {violation.check for violation in engine.violations}
    assert found == (set() if is_off else {check})


@pytest.mark.parametrize("check", ["chain", "content", "presence"])
def test_a_check_that_was_off_for_a_while_is_right_again(engine, check):
    """Nothing of what happened meanwhile is taken for damage, and damage is found."""
    request = running(engine)
    engine.run(request, steps=10)
    others = [name for name in engine.unwrapped.settings.possible if name not in (check, "identity")]
    engine.set(checks=tuple(others))
    second = running(engine, 20)
    engine.finish(request)
    third = running(engine, 9)
    engine.cover()
    engine.set(checks=engine.unwrapped.settings.possible)
    engine.run(second, third, steps=4)
    engine.cover()
    assert engine.violations == []
    DAMAGE[check](engine, third)
    engine.decode(third)
    assert {violation.check for violation in engine.violations} == {check}


def test_with_content_off_no_slot_is_folded(engine):
    running(engine)
    engine.set(checks=("chain", "presence", "identity"))
    before = engine.unwrapped.figures.to_dict()["folded"]
    engine.cover()
    engine.session.idle()
    assert engine.unwrapped.figures.to_dict()["folded"] == before


# -- mode


def test_raise_stops_at_the_next_violation_and_log_does_not(engine):
    request = running(engine)
    engine.set(mode="raise")
    assert engine.state["mode"] == "raise"
    engine.set(mode="log")
    damage_chain(engine, request)
    engine.decode(request)
    assert len(engine.violations) > 0
    engine.set(mode="raise")
    damage_chain(engine, request)  # undone
    engine.decode(request)
    engine.rows.req_to_token[request.req_pool_idx, 0] = engine.rows.req_to_token[request.req_pool_idx, 5]
    with pytest.raises(CorruptionError):
        engine.decode(request)


def test_paused_until_the_flush_after_it_was_switched_on_again(engine):
    request = running(engine)
    engine.set(mode="off")
    assert engine.state["state"] == "paused"
    forwards = engine.unwrapped.forwards
    damage_chain(engine, request)
    engine.run(request, steps=3)
    stale = running(engine, 30)
    assert engine.unwrapped.forwards == forwards
    engine.flush()
    assert engine.state["state"] == "paused"  # a flush alone does not switch it on
    stale = running(engine, 30)
    engine.set(mode="log")
    assert engine.state["state"] == "waiting"
    engine.run(stale, steps=2)  # nobody knows what those slots hold
    assert engine.unwrapped.forwards == forwards
    assert engine.violations == []

    engine.flush()
    assert engine.state["state"] == "guarding"
    fresh = running(engine, 25)
    engine.cover()
    engine.session.idle()
    assert engine.violations == []
    assert engine.unwrapped.forwards > forwards
    engine.flip(int(engine.slots_of(fresh)[1]))
    engine.cover()
    damage_chain(engine, fresh)
    engine.decode(fresh)
    assert {violation.check for violation in engine.violations} == {"content", "chain"}
    names = [name for name, _ in engine.reporter.events if name in ("changed", "resumed")]
    assert names == ["changed", "changed", "resumed"]


def test_an_update_of_the_weights_while_paused_counts(engine):
    running(engine)
    engine.set(mode="off")
    engine.session.replace_weights("2")
    engine.set(mode="log")
    engine.flush()
    request = running(engine)
    assert engine.violations == []
    assert engine.unwrapped.truth.identities.weights == "2"
    engine.session.replace_weights("3")
    engine.prefill(engine.request(tokens=[*request.origin_input_ids, 5]), prefix=engine.slots_of(request)[:12])
    assert {violation.check for violation in engine.violations} == {"identity"}


def test_what_is_under_way_is_judged_before_a_change():
    """A verdict that was launched in mode log does not stop a server that is switched to raise behind it."""
    engine = SessionEngine()
    request = running(engine)
    engine.run(request, steps=10)
    settle, engine.guard.settle = engine.guard.settle, lambda result: None  # overlap: its result comes later
    damage_chain(engine, request)
    engine.decode(request)
    assert engine.violations == []
    engine.set(mode="raise")
    assert {violation.check for violation in engine.violations} == {"chain"}
    engine.guard.settle = settle


def test_a_change_in_which_the_guard_lets_go_is_not_accepted(engine, monkeypatch):
    running(engine)
    monkeypatch.setattr(engine.unwrapped, "conclude", lambda: 1 / 0)
    assert not engine.session.control.apply("kvcanary?id=x&mode=raise")
    assert engine.state["state"] == "detached"
    assert "let go" in engine.state["last_change"]["why"]


# -- the audit


@pytest.mark.parametrize("is_idle", [True, False])
@pytest.mark.parametrize("is_damaged", [True, False])
def test_an_audit_goes_over_everything_and_says_what_it_found(engine, is_idle, is_damaged):
    request = running(engine)
    if is_damaged:
        engine.flip(int(engine.slots_of(request)[2]))
    assert engine.state["audit"] is None
    engine.set(audit=True)
    assert engine.state["audit"]["state"] == "running"
    for _ in range(1000):
        engine.session.idle() if is_idle else engine.idle_forwards(1)
        if engine.state["audit"]["state"] == "done":
            break
    audit = engine.state["audit"]
    assert (audit["number"], audit["state"], audit["slots"]) == (1, "done", engine.unwrapped.scrubber.slot_count)
    assert audit["violations"] == ({"content": 1} if is_damaged else {})
    engine.set(audit=True)
    assert (engine.state["audit"]["number"], engine.state["audit"]["state"]) == (2, "running")


def test_an_audit_is_not_over_before_its_last_verdict_was_read():
    engine = SessionEngine()
    request = running(engine)
    engine.flip(int(engine.slots_of(request)[2]))
    engine.set(audit=True)
    settle, engine.guard.settle = engine.guard.settle, lambda result: None
    for _ in range(3):
        engine.idle_forwards(1)
    assert not engine.unwrapped.scrubber.is_hurried
    assert engine.state["audit"]["state"] == "running"
    engine.guard.settle = settle
    engine.idle_forwards(1)
    assert engine.state["audit"] | {"seconds": 0} == {
        "number": 1,
        "state": "done",
        "why": "",
        "slots": engine.unwrapped.scrubber.slot_count,
        "seconds": 0,
        "violations": {"content": 1},
    }


# -- the budget


def make_scrubber():
    scrubber = Scrubber(1, 100_001, 0.01, 1e-6)
    for _ in range(CALIBRATION_FORWARDS):
        scrubber.observe_forward(0.1)
    return scrubber


def rotate(scrubber):
    passes = scrubber.passes
    while scrubber.passes == passes:
        scrubber.next_range()


@pytest.mark.parametrize("budget", [0.1, 0.001])
def test_a_new_budget_is_in_force_from_the_next_pass_on(budget):
    scrubber = make_scrubber()
    rotate(scrubber)
    assert scrubber.slots_a_forward == 1000
    scrubber.set_budget(budget)
    scrubber.next_range()
    assert scrubber.slots_a_forward == 1000  # the period promised to slots damaged by now
    rotate(scrubber)
    wanted = round(budget * 0.1 / 1e-6)
    assert scrubber.slots_a_forward == max(wanted, 1000)  # a lower rate is announced a pass ahead
    assert scrubber.period_forwards == 100_000 // wanted
    rotate(scrubber)
    assert scrubber.slots_a_forward == round(budget * 0.1 / 1e-6)


def test_without_a_new_budget_the_period_never_grows():
    scrubber = make_scrubber()
    rotate(scrubber)
    for _ in range(CALIBRATION_FORWARDS):
        scrubber.observe_forward(0.01)
    rotate(scrubber)
    assert scrubber.slots_a_forward == 1000


@pytest.mark.parametrize("place", [0, 25_000, 50_000, 74_999])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_smaller_budget_keeps_the_promise_to_slots_damaged_before_it(place, is_first):
    """Whatever the period says at the moment of the damage bounds the forwards until the slot is folded."""
    scrubber = make_scrubber()
    if not is_first:
        rotate(scrubber)
    for forward in range(4 * scrubber.period_forwards):
        if forward == scrubber.period_forwards * 3 // 4:
            scrubber.set_budget(0.0001)
        promised, probe = scrubber.period_forwards, copy.deepcopy(scrubber)
        ranges = [probe.next_range() for _ in range(promised)]
        folds_it = any(start <= place + 1 < start + count for start, count in ranges)
        assert folds_it, f"not folded within {promised} forwards of forward {forward}"
        scrubber.next_range()


@pytest.mark.parametrize("change", [{"mode": "off"}, {"checks": ("chain",)}])
def test_an_audit_that_cannot_end_says_so(engine, change):
    running(engine)
    engine.set(audit=True)
    engine.set(**change)
    audit = engine.state["audit"]
    assert audit["state"] == "stopped"
    assert "off" in audit["why"]
    assert not engine.unwrapped.scrubber.is_hurried


def test_what_a_muted_check_finds_takes_no_room_from_others():
    engine = SessionEngine(checks=tuple(check for check in CHECKS if check != "order"))
    request = running(engine)
    engine.run(request, steps=6)
    engine.set(checks=("chain", "content", "presence", "identity"))
    engine.unwrapped.ledger.note_free(torch.arange(150, 450))  # none of them is in use
    damage_chain(engine, request)
    engine.decode(request)
    assert {violation.check for violation in engine.violations} == {"chain"}
    assert "unlisted" not in engine.reporter.counts


def test_slots_count_as_verified_only_where_they_are(engine):
    request = running(engine)
    engine.set(checks=("content",))
    before = engine.state["verified"]
    engine.run(request, steps=3)
    assert engine.state["verified"] == before


@pytest.mark.parametrize("id", ["\ud800", "\0", "%ED%A0%80", "%1b[31m", "x" * 65])
def test_an_id_that_cannot_be_shown_is_refused(engine, id):
    assert not engine.session.control.apply(f"kvcanary?id={id}&scrub_budget=0.5")
    json.dumps(engine.state, ensure_ascii=False).encode()
    assert engine.state["scrub_budget"] == 1.0
