"""Each fault, on SGLang's own pool: it does what it says, and the guard finds it where it says."""

from typing import Any

import pytest
import torch

from kvcanary_plugin.config import CHECKS
from kvcanary_plugin.errors import ConfigError
from kvcanary_plugin.faults import stores
from kvcanary_plugin.faults.identity import IDENTITY_FAULTS
from kvcanary_plugin.faults.injector import FAULTS, FOUND_BY, Injector
from kvcanary_plugin.faults.library import FAULTS as PLAIN_FAULTS
from kvcanary_plugin.runtime.identity import conceal
from tests.engine import Engine
from tests.unit.test_identity import with_image
from tests.unit.test_state import HybridEngine
from tests.unit.test_window import WINDOW, WindowEngine


def injected_into(engine: Engine) -> dict[str, Any]:
    """What the one fault did."""
    (injected,) = [fields for event, fields in engine.reporter.events if event == "injected"]
    return injected


class Owned(Engine):
    """An engine with every check, whose allocator says what it is asked for, which a fault does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(checks=CHECKS, **options)
        free, alloc = self.allocator.free, self.allocator.alloc
        ledger = self.guard.ledger
        ledger.adopt_tree()

        def free_and_tell(slots: torch.Tensor) -> None:
            self.guard.traffic.release(slots)
            ledger.note_free(slots)
            free(slots)

        def alloc_and_tell(count: int) -> torch.Tensor:
            slots = alloc(count)
            ledger.note_alloc(slots)
            return slots

        self.allocator.free, self.allocator.alloc = free_and_tell, alloc_and_tell

    def _allocate(self, requests: Any, starts: list[int], ends: list[int]) -> torch.Tensor:
        if self.page_size > 1:
            return super()._allocate(requests, starts, ends)
        count = sum(ends) - sum(starts)
        slots, self.allocator.free_pages = self.allocator.free_pages.split(
            [count, len(self.allocator.free_pages) - count]
        )
        return slots


@pytest.mark.parametrize("name", PLAIN_FAULTS)
def test_every_fault_is_found_in_the_right_place(page_size, name):
    engine = Engine(page_size=page_size, inject=f"{name}@6")
    cached = engine.request(32)
    engine.prefill(cached)
    engine.finish(cached, keep=32)
    one, other = engine.request(40), engine.request(45)
    engine.prefill(one, other)
    engine.run(one, other, steps=8)
    engine.settle_scrub()

    (injected,) = [fields for event, fields in engine.reporter.events if event == "injected"]
    assert injected["fault"] == name
    found = {(v.check, v.slot, v.position) for v in engine.violations}
    assert found == {
        (injected["check"], *place) for place in zip(injected["slots"], injected["positions"], strict=True)
    }
    if "layer" in injected:
        assert [(v.layer, v.half) for v in engine.violations] == [(injected["layer"], injected["half"])]


def test_a_store_that_is_skipped_is_found_in_the_same_forward(page_size):
    engine = Engine(page_size=page_size, inject="skip_store@6:layer=2,half=K")
    one, other = engine.request(40), engine.request(45)
    engine.prefill(one, other)
    engine.run(one, other, steps=8)
    (injected,) = [fields for event, fields in engine.reporter.events if event == "injected"]
    assert injected["requests"] == [one.rid, other.rid]
    assert {(v.check, v.layer, v.half, v.request, v.step) for v in engine.violations} == {
        ("presence", 2, "K", rid, injected["step"]) for rid in injected["requests"]
    }


def test_a_token_that_is_not_stored_is_found_alone(page_size):
    engine = Engine(page_size=page_size, inject="skip_token@6:layer=1,half=V")
    one, other = engine.request(40), engine.request(45)
    engine.prefill(one, other)
    engine.run(one, other, steps=8)
    injected = injected_into(engine)
    (violation,) = engine.violations
    assert (violation.check, violation.kind, violation.layer, violation.half) == ("presence", "not_stored", 1, "V")
    assert (violation.request, violation.step) == (injected["request"], injected["step"])
    assert ([violation.slot], [violation.position]) == (injected["slots"], injected["positions"])


FIELDS = {
    "other_adapter": ("lora", "", "drill"),
    "other_salt": ("cache_salt", "", conceal("drill")),
    "other_weights": ("weights", "0", "drill"),
    "other_dtype": ("dtype", "torch.bfloat16", "drill"),
    "other_scales": ("scales", "none", "drill"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_prefix_made_for_something_else_is_recognised_as_that_and_nothing_of_it_stays(page_size, name):
    engine = Engine(page_size=page_size, inject=f"{name}@6")
    request, late = engine.request(40), engine.request(20)
    engine.prefill(request)
    engine.run(request, steps=8)
    injected = injected_into(engine)
    [violation] = engine.violations
    assert (violation.check, violation.kind, violation.step) == ("identity", "other_identity", injected["step"])
    assert (violation.slot, violation.position) == (injected["slots"][0], 0)
    assert violation.differs == (FIELDS[name],)
    engine.prefill(late)
    engine.run(request, late, steps=4)
    assert len(engine.violations) == 1


def test_an_image_whose_digest_is_cut_short_is_found_where_it_begins():
    engine = Engine(inject="other_image@3")
    request = with_image(engine, 2**100 + 5)
    engine.prefill(request)
    engine.run(request, steps=6)
    injected = injected_into(engine)
    [violation] = engine.violations
    assert (violation.check, violation.step, violation.request) == ("chain", injected["step"], request.rid)
    assert (violation.slot, violation.position) == (injected["slots"][0], 10)


def test_a_hit_that_lacks_a_part_is_found_at_the_match(page_size):
    engine = Engine(page_size=page_size, inject="drop_part@3:layer=2,half=V")
    tokens = list(range(32))
    cached = engine.request(tokens=tokens)
    engine.prefill(cached)
    engine.decode(cached)
    prefix = engine.finish(cached, keep=32)
    heir = engine.request(tokens=[*tokens, 5, 6])
    engine.prefill(heir, prefix=prefix)
    injected = injected_into(engine)
    assert injected["positions"] == list(range(24, 32))
    assert {(v.check, v.phase, v.layer, v.half, v.step, v.request) for v in engine.violations} == {
        ("content", "start", 2, "V", injected["step"], heir.rid)
    }
    assert [(v.slot, v.position) for v in engine.violations] == list(
        zip(injected["slots"], injected["positions"], strict=True)
    )


def test_a_state_that_is_lost_is_found_at_the_next_forward():
    engine = HybridEngine(inject="drop_state@4")
    one, other = engine.request(20), engine.request(9)
    engine.prefill(one, other)
    engine.run(one, other, steps=8)
    injected = injected_into(engine)
    [violation] = engine.violations
    assert (violation.check, violation.kind, violation.step) == ("content", "state", injected["step"])
    assert (violation.request, violation.slot) == (injected["request"], injected["slots"][0])


def test_a_slot_freed_within_the_window_is_found_by_whom_it_misses():
    engine = WindowEngine(inject="free_in_window@8")
    one, other = engine.request(20), engine.request(3)
    engine.prefill(one, other)
    engine.run(one, other, steps=20)
    injected = injected_into(engine)
    violation = engine.violations[0]
    assert {(v.check, v.request, v.step) for v in engine.violations} == {
        ("chain", injected["request"], injected["step"])
    }
    assert (violation.kind, violation.position) == ("unmapped", injected["positions"][0])
    length = next(r for r in (one, other) if r.rid == injected["request"]).kv_committed_len
    assert violation.position >= length - 20 + 6 - WINDOW


@pytest.mark.parametrize("name", stores.AT_LAUNCH)
def test_a_token_that_is_stored_elsewhere_is_found_before_the_forward_and_put_right_behind_it(page_size, name):
    engine = Owned(page_size=page_size, inject=f"{name}@30")
    one, other = engine.request(40), engine.request(45)
    engine.prefill(one, other)
    engine.run(one, other, steps=45)
    engine.settle_scrub()
    injected = injected_into(engine)
    slots = set(injected["slots"])
    assert {v.step for v in engine.violations} == {injected["step"]}
    owned = [v for v in engine.violations if v.check == "ownership"]
    assert {v.slot for v in owned} == slots
    if name == "take_freed":
        assert {(v.kind, v.request, v.owner) for v in owned} == {
            ("free_in_use", None, injected["request"]),
            ("foreign_slot", injected["request"], injected["other"]),
        }
        assert {(v.check, v.request) for v in engine.violations if v not in owned} == {("chain", injected["request"])}
    else:
        assert [(v.kind, v.request, v.position) for v in engine.violations] == [
            ("write_not_owned", injected["request"], injected["positions"][0])
        ]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("drop_state", {}, "no state"),
        ("free_in_window", {}, "no space of a sliding window"),
        ("store_last", {"content": "none"}, "could not be put right"),
        ("free_cached", {}, "which slots this prefix cache holds"),
    ],
)
def test_what_the_pool_does_not_have_is_said_and_does_not_hold_up_the_next_fault(name, options, words, caplog):
    checks = ("chain", "ownership") if options else ("chain", "content", "ownership")
    engine = Engine(checks=checks, inject=f"{name}@3;swap_entries@5", **options)
    engine.prefill(request := engine.request(30))
    engine.run(request, steps=6)
    assert f"{name}@3 is left out: " in caplog.text
    assert words in caplog.text
    assert injected_into(engine)["fault"] == "swap_entries"


def test_every_fault_is_promised_to_a_check():
    assert set(FOUND_BY) <= set(FAULTS)
    assert {FOUND_BY.get(name, "chain") for name in FAULTS} == set(CHECKS)
    assert {FOUND_BY.get(name, "chain") for name in IDENTITY_FAULTS} == {"identity", "chain"}


@pytest.mark.parametrize("name", ["flip_running", "overwrite_slot"])
def test_bytes_are_damaged_where_they_stay_until_the_pass_comes_by(name):
    """What lies in a page that is not full yet is freed with its request, maybe a forward later."""
    engine = Engine(page_size=16, inject=f"{name}@3")
    request = engine.request(9)
    engine.prefill(request)
    engine.run(request, steps=6)
    assert [event for event, _ in engine.reporter.events if event == "injected"] == []

    engine.run(request, steps=20)
    assert max(injected_into(engine)["positions"]) < 16


def test_options_choose_the_bit():
    engine = Engine(inject="flip_running@3:layer=1,half=V,bit=17")
    request = engine.request(30)
    engine.prefill(request)
    engine.decode(request)
    before = engine.pool.v_buffer[1].clone()
    engine.decode(request)
    (injected,) = [fields for event, fields in engine.reporter.events if event == "injected"]
    (slot,) = injected["slots"]
    changed = before.view(-1)[: before.numel()].view(before.shape) != engine.pool.v_buffer[1]

    assert (injected["layer"], injected["half"], injected["bit"]) == (1, "V", 17)
    assert changed[slot].nonzero().tolist() == [[0, 1]]  # bit 17 lies in the second bfloat16


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("explode@3", "no fault 'explode'; there are flip_running"),
        (" ; ", "names no fault"),
        ("flip_running@\u00b2", "is not a forward number"),
        ("flip_running@3:bit=-1", "bit=-1 is not a number"),
        ("flip_running", "'' is not a forward number"),
        ("flip_running@soon", "'soon' is not a forward number"),
        ("flip_running@3:colour=red", "no option 'colour'"),
        ("flip_running@3:layer=two", "layer=two is not a number"),
    ],
)
def test_a_slip_in_the_specification_is_named(spec, words):
    with pytest.raises(ConfigError, match=words):
        Injector.parse(spec)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inject": "flip_running@3:layer=9"}, "layer=9; the pool has 0 to 2"),
        ({"inject": "flip_running@3:bit=512"}, "bit=512; a row has bits 0 to 511"),
        ({"inject": "flip_running@3", "checks": ("chain",)}, "content, is off"),
        ({"inject": "overwrite_slot@3", "content": "none"}, "content, is off"),
        ({"inject": "swap_entries@3", "checks": ("content",)}, "chain, is off"),
    ],
)
def test_a_fault_the_pool_cannot_have_is_refused_at_the_start(options, words):
    with pytest.raises(ConfigError, match=words):
        Engine(**options)


def test_a_half_that_the_pool_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="half=X; the pool has K, V"):
        Engine(inject="flip_running@3:half=X")
