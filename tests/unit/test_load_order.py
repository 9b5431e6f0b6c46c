"""Forwards and the layers that come back for them, in SGLang's own hierarchical cache and by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sglang.srt.managers.cache_controller import LayerLoadingEvent

from kvcanary_plugin.runtime.load_order import LoadOrder
from kvcanary_plugin.runtime.violation import Violation
from tests.hierarchy import LAYERS, Hierarchy

PROMPT = list(range(100, 148))


@pytest.fixture
def hierarchy() -> Iterator[Hierarchy]:
    made = Hierarchy()
    yield made
    made.close()


@pytest.fixture
def order() -> LoadOrder:
    def describe(step: int, layer: int, request: str) -> Violation:
        return Violation("order", "unordered_load", "test", 0, step, "load", -1, layer=layer, request=request)

    return LoadOrder(LAYERS, torch.device("cpu"), describe)


def push_out(hierarchy: Hierarchy) -> None:
    hierarchy.serve(PROMPT)
    hierarchy.push_out()


def delay_layers(hierarchy: Hierarchy, monkeypatch: pytest.MonkeyPatch, *layers: int) -> None:
    """These layers come when the forward is over, and the forward does not wait: a CPU has no streams to wait on."""
    complete, late = LayerLoadingEvent.complete, []

    def complete_late(self: Any, layer_index: int) -> None:
        if layer_index in layers:
            late.append(lambda: complete(self, layer_index))
        else:
            complete(self, layer_index)

    def come() -> None:
        for layer in late:
            layer()

    monkeypatch.setattr(LayerLoadingEvent, "complete", complete_late)
    hierarchy.between = come


@pytest.mark.parametrize("layers", [(0,), (1, 2), (0, 1, 2)])
def test_a_forward_that_does_not_wait_for_a_layer_is_found(hierarchy, monkeypatch, layers):
    push_out(hierarchy)
    delay_layers(hierarchy, monkeypatch, *layers)
    request = hierarchy.request(tokens=[*PROMPT, 7])
    hierarchy.process(hierarchy.prefill(request))
    (violation,) = hierarchy.violations
    assert (violation.check, violation.kind, violation.layer) == ("order", "unordered_load", layers[0])
    assert violation.request == request.rid
    assert "host memory" in violation.explanation


def test_a_layer_that_the_model_never_asks_for_may_be_late(hierarchy, monkeypatch):
    push_out(hierarchy)
    delay_layers(hierarchy, monkeypatch, 2)
    monkeypatch.setattr(hierarchy, "read_layers", lambda: [hierarchy.pool.get_key_buffer(layer) for layer in (0, 1)])
    hierarchy.process(hierarchy.prefill(hierarchy.request(tokens=[*PROMPT, 7])))
    assert not hierarchy.violations


@pytest.mark.parametrize(("late", "count"), [((), 0), ((1,), 1)])
def test_a_forward_that_asks_for_no_layer_needs_all_of_them(hierarchy, monkeypatch, late, count):
    push_out(hierarchy)
    monkeypatch.setattr(hierarchy, "read_layers", lambda: None)
    delay_layers(hierarchy, monkeypatch, *late)
    between, hierarchy.between = hierarchy.between, None
    hierarchy.process(hierarchy.prefill(hierarchy.request(tokens=[*PROMPT, 7])))
    between()
    assert len(hierarchy.violations) == count


def test_a_forward_of_others_may_run_while_rows_are_on_their_way(hierarchy, monkeypatch):
    push_out(hierarchy)
    other = hierarchy.request(tokens=list(range(500, 520)))
    hierarchy.process(hierarchy.prefill(other))
    begin = hierarchy.transfers.begin
    asked: list[Callable[[], None]] = []
    monkeypatch.setattr(hierarchy.transfers, "begin", lambda step: (begin(step), asked.append(step)))
    hierarchy.process(hierarchy.decode(other))
    assert asked
    assert not hierarchy.transfers.order._due
    assert not hierarchy.violations


def test_tickets_of_an_earlier_load_are_not_enough(order):
    order.load = 1
    for layer in range(LAYERS):
        order.note_layer(layer)
    order.load = 2
    order.note_layer(0)
    order.begin(5, 2, "r1")
    for layer in range(LAYERS):
        order.note_use(layer)
    order.end()
    (found,) = order.read(5)
    assert (found.layer, found.step, found.request) == (1, 5, "r1")
    assert not order.read(5)


def test_two_forwards_under_way_are_told_apart(order):
    order.load = 1
    order.begin(1, 1, "early")
    order.note_use(0)
    order.end()
    order.note_layer(0)
    order.begin(2, 1, "late")
    order.note_use(0)
    order.end()
    assert [each.request for each in order.read(1)] == ["early"]
    assert not order.read(2)


def test_what_was_under_way_is_forgotten_with_a_flush(order):
    order.load = 1
    order.begin(1, 1, "r1")
    order.note_use(0)
    order.end()
    order.clear()
    assert not order.read(1)


def test_muting_the_check_leaves_loads_alone():
    hierarchy = Hierarchy(checks=frozenset({"chain", "content"}))
    try:
        push_out(hierarchy)
        assert hierarchy.transfers.order is None
        hierarchy.process(hierarchy.prefill(hierarchy.request(tokens=[*PROMPT, 7])))
        assert not hierarchy.violations
    finally:
        hierarchy.close()
