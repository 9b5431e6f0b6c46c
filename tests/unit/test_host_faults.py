"""Each named fault in host memory is found; the same server without it is silent."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvcanary_plugin.faults.host import FOUND_BY, HOST_FAULTS, LAUNCH_FAULTS
from kvcanary_plugin.faults.injector import Injector
from kvcanary_plugin.kernels.record import IDENTITY, LIVE_BIT, RECORD_WORDS
from kvcanary_plugin.runtime.backup_order import BackupOrder
from kvcanary_plugin.runtime.cause import TO_HOST
from kvcanary_plugin.runtime.step import Step
from tests.hierarchy import Gate, Hierarchy

PROMPT = list(range(100, 148))
LAYOUTS = [("direct", "layer_first"), ("direct", "page_first_direct"), ("kernel", "page_first")]


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Hierarchy] = []

    def make_one(**options: Any) -> Hierarchy:
        made.append(Hierarchy(**options))
        return made[-1]

    yield make_one
    for hierarchy in made:
        hierarchy.close()


def inject(hierarchy: Hierarchy, name: str, seed: int = 0, **options: str) -> Any:
    step = Step.__new__(Step)
    return (HOST_FAULTS | LAUNCH_FAULTS)[name](hierarchy.guard, step, random.Random(seed), options)


def load(hierarchy: Hierarchy) -> list[Any]:
    """The prompt comes back."""
    hierarchy.process(hierarchy.prefill(hierarchy.request(tokens=[*PROMPT, 7])))
    return hierarchy.violations


@pytest.mark.parametrize(("io_backend", "layout"), LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_is_found_where_it_was_flipped(make, io_backend, layout, seed):
    hierarchy = make(page_size=16, size=192, io_backend=io_backend, layout=layout)
    hierarchy.serve(PROMPT)
    hierarchy.push_out()
    done = None
    while done is None or done.fields["host_slot"] not in hierarchy.host_slots_of(PROMPT):
        if done is not None:  # a row that will not be loaded: put it right
            inject(hierarchy, "flip_host", seed)
        seed += 100
        done = inject(hierarchy, "flip_host", seed)
    (violation,) = load(hierarchy)
    assert (violation.check, violation.hop) == (done.check, TO_HOST)
    fields = done.fields
    assert (violation.host_slot, violation.layer, violation.half) == (
        fields["host_slot"],
        fields["layer"],
        fields["half"],
    )


def test_the_place_of_a_flipped_bit_can_be_chosen(make):
    hierarchy = make()
    hierarchy.serve(PROMPT, steps=0)
    fields = inject(hierarchy, "flip_host", layer="1", half="V", bit="3").fields
    assert (fields["layer"], fields["half"], fields["bit"]) == (1, "V", 3)


@pytest.mark.parametrize(("io_backend", "layout"), LAYOUTS)
def test_swapped_pages_are_found(make, io_backend, layout):
    hierarchy = make(page_size=16, size=192, io_backend=io_backend, layout=layout)
    hierarchy.serve(PROMPT, steps=0)
    hierarchy.push_out()
    assert len(hierarchy.host_slots_of(PROMPT)) == len(PROMPT)
    inject(hierarchy, "swap_host_pages")
    assert {violation.check for violation in load(hierarchy)} == {"content"}
    assert len(hierarchy.violations) == 32


def test_a_host_page_that_is_freed_while_it_is_loaded_is_found(make):
    hierarchy = make(page_size=16, size=192)
    hierarchy.serve(PROMPT)
    hierarchy.push_out()
    free = len(hierarchy.host.free_slots)
    undo: list[Any] = []

    start = hierarchy.tree.ready_to_load_host_cache

    def start_slowly() -> int:
        loading = start()
        Gate.is_open = False
        return loading

    hierarchy.tree.ready_to_load_host_cache = start_slowly
    hierarchy.between = lambda: undo.append(inject(hierarchy, "free_host_in_use"))
    request = hierarchy.request(tokens=[*PROMPT, 7])
    launched = hierarchy.prefill(request)
    hierarchy.tree.ready_to_load_host_cache, Gate.is_open = start, True
    undo[0].restore()
    assert len(hierarchy.host.free_slots) == free, "and the host pool is as it was"
    hierarchy.process(launched)
    hierarchy.process(hierarchy.decode(request), finish=[request])
    assert [violation.kind for violation in hierarchy.violations] == ["host_free_in_flight"] * 16
    hierarchy.push_out()
    assert len(load(hierarchy)) == 16, "and goes on without another finding"


@pytest.mark.parametrize(("io_backend", "layout"), LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_row_that_is_copied_ahead_of_the_forward_that_stores_it_is_found(make, page_size, io_backend, layout):
    hierarchy = make(page_size=page_size, size=192, io_backend=io_backend, layout=layout)
    hierarchy.guard.injector = Injector.parse("early_backup@3")  # a server on a CPU has no order, and would refuse it
    free = len(hierarchy.host.free_slots)
    hierarchy.serve(PROMPT, steps=4)
    (injected,) = [fields for name, fields in hierarchy.reporter.events if name == "injected"]
    (violation,) = hierarchy.violations
    assert (violation.check, violation.kind, violation.phase) == ("order", "unordered_backup", "backup")
    assert [violation.slot] == injected["slots"]
    assert 0 <= violation.step - injected["step"] <= 1
    hierarchy.push_out()
    assert not load(hierarchy)[1:], "and the copy was forgotten"
    assert len(hierarchy.host.free_slots) < free


def test_a_copy_of_slots_that_do_not_exist_is_found():
    records = torch.zeros((8, RECORD_WORDS), dtype=torch.int64)
    records[:, IDENTITY] = LIVE_BIT
    order = BackupOrder(records, lambda step, slot: (step, slot))
    for slots in ([1, 7], [1, 8], [-1, 3], []):
        order.begin(torch.tensor(slots, dtype=torch.int32), 5)
    assert order.read() == [(5, 8), (5, -1)]
    assert order.read() == []


@pytest.mark.parametrize("name", [*(name for name in HOST_FAULTS if name != "early_backup"), *LAUNCH_FAULTS])
def test_without_host_memory_in_use_there_is_nothing_to_do(make, name):
    hierarchy = make()
    assert inject(hierarchy, name) is None


def test_without_a_fault_all_of_it_is_silent(make):
    hierarchy = make(page_size=16, size=192)
    hierarchy.serve(PROMPT)
    hierarchy.push_out()
    assert not load(hierarchy)


def test_each_fault_says_what_it_does_and_who_finds_it():
    faults = HOST_FAULTS | LAUNCH_FAULTS
    assert set(FOUND_BY) == set(faults)
    assert all(fault.__doc__ for fault in faults.values())


def test_rows_of_an_unknown_layout_are_left_alone(make):
    hierarchy = make()
    hierarchy.serve(PROMPT)
    hierarchy.host.layout = "other"
    before = torch.clone(hierarchy.host.kv_buffer)
    assert inject(hierarchy, "flip_host") is None
    assert inject(hierarchy, "swap_host_pages") is None
    assert torch.equal(hierarchy.host.kv_buffer, before)
