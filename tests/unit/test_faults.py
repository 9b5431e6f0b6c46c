"""Each fault, on SGLang's own pool: it does what it says, and the guard finds it where it says."""

import pytest

from kvcanary_plugin.errors import ConfigError
from kvcanary_plugin.faults.injector import Injector
from kvcanary_plugin.faults.library import FAULTS, FOUND_BY
from tests.engine import Engine


@pytest.mark.parametrize("name", [name for name in FAULTS if FOUND_BY.get(name, "chain") in ("chain", "content")])
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


def test_a_prefix_of_another_adapter_is_recognised_as_that_and_nothing_of_it_stays(page_size):
    engine = Engine(page_size=page_size, inject="other_adapter@6")
    request = engine.request(40)
    engine.prefill(request)
    engine.run(request, steps=8)
    (injected,) = [fields for event, fields in engine.reporter.events if event == "injected"]
    [violation] = engine.violations
    assert (violation.check, violation.step) == ("identity", injected["step"])
    assert (violation.slot, violation.position) == (injected["slots"][0], 0)
    assert violation.differs == (("lora", "", "drill"),)


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
