"""Rows that go to host memory and come back, on SGLang's own hierarchical cache."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvcanary_plugin.errors import GuardError, UncoveredError
from kvcanary_plugin.patches.hierarchical import list_host_gaps, list_pool_gaps
from kvcanary_plugin.runtime.cause import ROUND_TRIP, TO_DEVICE, TO_HOST
from kvcanary_plugin.runtime.violation import Violation
from tests.hierarchy import Gate, Hierarchy
from tests.unit.test_window import WindowEngine

PROMPT = list(range(100, 148))
WAYS = [("direct", "layer_first"), ("direct", "page_first_direct"), ("kernel", "layer_first"), ("kernel", "page_first")]


@pytest.fixture
def make() -> Iterator[object]:
    made: list[Hierarchy] = []

    def make_one(**options: object) -> Hierarchy:
        made.append(Hierarchy(**options))
        return made[-1]

    yield make_one
    for hierarchy in made:
        hierarchy.close()


def serve_some(hierarchy: Hierarchy, seed: int, rounds: int) -> int:
    """Random requests that share prefixes, more than the device has room for. Returns tokens that were loaded."""
    rng = random.Random(seed)
    stems = [[rng.randrange(1000) for _ in range(48)] for _ in range(4)]
    loaded = 0
    for _ in range(rounds):
        batch = []
        for _ in range(rng.choice((1, 2))):
            stem = rng.choice(stems)[: rng.choice((16, 32, 48))]
            batch.append(hierarchy.request(tokens=stem + [rng.randrange(1000) for _ in range(rng.randrange(1, 8))]))
        before = len(hierarchy.transfers.landed)
        # Both at once share one load; the tree may have given up what the second would have matched.
        launched = [hierarchy.prefill(*batch)] if rng.random() < 0.5 else [hierarchy.prefill(each) for each in batch]
        loaded += sum(len(load.slots) for _, load in list(hierarchy.transfers.landed)[before:])
        for each in launched:
            hierarchy.process(each)
        for _ in range(rng.randrange(4)):
            hierarchy.process(hierarchy.decode())
        if rng.random() < 0.1 and len(batch) > 1:
            hierarchy.retract(batch.pop())
        for request in batch:
            hierarchy.finish(request)
        if rng.random() < 0.2:
            hierarchy.push_out()
        if rng.random() < 0.02:
            hierarchy.flush()
    return loaded


def close_gate() -> None:
    Gate.is_open = False


def idle_through(hierarchy: Hierarchy) -> None:
    """The rotating pass covers the pool."""
    for _ in range(2 * (hierarchy.guard.scrubber.period_forwards + 1)):
        hierarchy._launch([], [], [], torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_what_comes_back_intact_is_silent(make, policy, page_size):
    hierarchy = make(policy=policy, page_size=page_size, size=max(192, 6 * page_size), ratio=2.0)
    loaded = serve_some(hierarchy, seed=page_size, rounds=150)
    idle_through(hierarchy)
    assert hierarchy.violations == []
    assert loaded > 100 or page_size == 64  # no stem fills such a page


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize(("io_backend", "layout"), WAYS)
def test_every_layout_of_host_memory_is_silent(make, kind, io_backend, layout):
    if kind == "mla" and io_backend == "kernel":
        pytest.skip("no stand-in for these copies")
    hierarchy = make(kind=kind, io_backend=io_backend, layout=layout, page_size=16, size=192)
    assert serve_some(hierarchy, seed=5, rounds=60) > 100
    assert hierarchy.violations == []


def test_host_slots_are_given_out_anew_under_pressure(make):
    hierarchy = make(ratio=1.2, size=160)
    steps = []
    for seed in range(4):
        assert serve_some(hierarchy, seed=seed, rounds=40) > 0
        steps.append(hierarchy.transfers.host.since.copy())
    assert hierarchy.violations == []
    assert ((steps[0] > 0) & (steps[-1] > steps[0])).any()


def damaged_load(hierarchy: Hierarchy, damage: Callable[[list[int]], None]) -> tuple[Req, list[Violation]]:
    """A prompt goes out, ``damage`` is done to its host slots, and it comes back for another request."""
    hierarchy.serve(PROMPT)
    hierarchy.push_out()
    assert hierarchy.violations == []
    damage(hierarchy.host_slots_of(PROMPT))
    request = hierarchy.request(tokens=[*PROMPT, 7, 8])
    hierarchy.process(hierarchy.prefill(request))
    return request, list(hierarchy.violations)


@pytest.mark.parametrize(("io_backend", "layout"), WAYS)
def test_a_flipped_bit_in_host_memory_is_found_at_the_load(make, io_backend, layout):
    hierarchy = make(io_backend=io_backend, layout=layout, page_size=16, size=192)
    host, chosen = hierarchy.host, {}

    def flip(slots: list[int]) -> None:
        chosen["slot"] = slot = slots[21]
        page, offset = divmod(slot, 16)
        places = {"layer_first": (1, 2, slot), "page_first": (1, slot, 2), "page_first_direct": (1, page, 2, offset)}
        host.kv_buffer[places[layout]].view(torch.int16)[1, 3] ^= 1 << 5

    request, (violation,) = damaged_load(hierarchy, flip)
    step = hierarchy.guard.forwards
    assert (violation.check, violation.phase, violation.step) == ("content", "load", step)
    assert (violation.position, violation.layer, violation.half) == (21, 2, "V")
    assert violation.slot == hierarchy.slots_of(request)[21]
    assert (violation.tier, violation.hop, violation.host_slot) == ("host", TO_HOST, chosen["slot"])
    assert violation.request == request.rid
    assert "on the device, when it was copied" in violation.last_good
    assert violation.to_dict()["hop"] == TO_HOST
    assert violation.to_dict()["cause"].startswith("the row was copied before it was complete, or host memory")


def test_mla_too(make):
    hierarchy = make(kind="mla")
    host = hierarchy.host

    def flip(slots: list[int]) -> None:
        host.kv_buffer[1, slots[5]].view(torch.int16)[0, 0] ^= 1

    _, (violation,) = damaged_load(hierarchy, flip)
    assert (violation.check, violation.layer, violation.position, violation.hop) == ("content", 1, 5, TO_HOST)


def test_host_pages_that_were_exchanged_are_found(make):
    hierarchy = make(page_size=16, size=192)
    buffer = hierarchy.host.kv_buffer

    def swap(slots: list[int]) -> None:
        one, other = slots[:16], slots[16:32]
        kept = buffer[:, :, one].clone()
        buffer[:, :, one] = buffer[:, :, other]
        buffer[:, :, other] = kept

    _, violations = damaged_load(hierarchy, swap)
    assert sorted(v.position for v in violations) == list(range(32))
    assert {(v.check, v.hop) for v in violations} == {("content", TO_HOST)}


def test_bytes_of_an_older_copy_are_found(make):
    """The same tokens, computed anew, have other bytes: those of the time before do not pass for them."""
    hierarchy = make()
    hierarchy.serve(PROMPT)
    hierarchy.push_out()
    older = hierarchy.host.kv_buffer[:, :, hierarchy.host_slots_of(PROMPT)].clone()
    hierarchy.flush()

    def put_back(slots: list[int]) -> None:
        hierarchy.host.kv_buffer[:, :, slots] = older

    _, violations = damaged_load(hierarchy, put_back)
    assert len(violations) == len(PROMPT)
    assert {(v.check, v.hop) for v in violations} == {("content", TO_HOST)}


def test_a_layer_that_was_not_copied_back_is_found(make):
    hierarchy = make()
    hierarchy.layers_lost = (1,)
    _, violations = damaged_load(hierarchy, lambda _: None)
    assert len(violations) == len(PROMPT)
    assert {(v.check, v.phase, v.layer, v.hop) for v in violations} == {("content", "load", None, TO_DEVICE)}


def test_what_was_overwritten_after_it_came_is_found_with_its_host_copy_intact(make):
    hierarchy = make()

    def overwrite() -> None:
        (load,) = hierarchy.transfers._loads
        hierarchy.pool.k_buffer[0][load.slots[3], 0, 0] += 1

    hierarchy.serve(PROMPT)
    hierarchy.push_out()
    hierarchy.between = overwrite
    hierarchy.process(hierarchy.prefill(hierarchy.request(tokens=[*PROMPT, 7])))
    (violation,) = hierarchy.violations
    assert (violation.position, violation.layer, violation.half, violation.hop) == (3, 0, "K", TO_DEVICE)
    assert violation.last_good == f"in host slot {violation.host_slot}, where it still is"


def test_a_row_that_was_copied_before_it_was_complete_is_found(make):
    hierarchy = make()
    back_up = hierarchy.host.backup_from_device_all_layer

    def too_early(pool, host, device, io_backend):
        kept = pool.v_buffer[2][device].clone()
        pool.v_buffer[2][device] = 0  # the last layer has not been stored yet
        back_up(pool, host, device, io_backend)
        pool.v_buffer[2][device] = kept

    hierarchy.host.backup_from_device_all_layer = too_early
    _, violations = damaged_load(hierarchy, lambda _: None)
    assert {(v.check, v.layer, v.half, v.hop) for v in violations} == {("content", 2, "V", TO_HOST)}


def test_when_host_memory_has_changed_since_only_the_way_is_known(make):
    hierarchy = make()
    hierarchy.serve(PROMPT)
    hierarchy.push_out()
    slot = hierarchy.host_slots_of(PROMPT)[2]

    def change() -> None:
        hierarchy.host.kv_buffer[0, 0, slot] += 1

    change()
    hierarchy.between = change
    hierarchy.process(hierarchy.prefill(hierarchy.request(tokens=[*PROMPT, 7])))
    (violation,) = hierarchy.violations
    assert (violation.position, violation.hop) == (2, ROUND_TRIP)


def test_a_host_slot_without_a_record_is_found(make):
    """Its record did not travel, or it was never filled: nobody can say what the bytes are."""
    hierarchy = make()
    host = hierarchy.transfers.host

    def lose(slots: list[int]) -> None:
        host.since[slots[4:6]] = 0

    _, violations = damaged_load(hierarchy, lose)
    found = {(v.check, v.kind) for v in violations}
    assert found == {("ownership", "host_slot_empty"), ("chain", "dead_slot")}
    assert {v.position for v in violations if v.check == "chain"} == {4, 5}
    assert {v.tier for v in violations if v.check == "ownership"} == {"host"}


def test_the_prefix_of_another_request_is_found_before_the_forward(make):
    """Records travel by host slot: what a node wrongly names is told by what is in it."""
    hierarchy = make()
    other = [token + 500 for token in PROMPT]
    hierarchy.serve(other)
    hierarchy.serve(PROMPT)
    hierarchy.push_out()
    mine, theirs = (hierarchy.nodes_of(tokens)[0] for tokens in (PROMPT, other))
    mine.host_value, theirs.host_value = theirs.host_value, mine.host_value
    hierarchy.process(hierarchy.prefill(hierarchy.request(tokens=[*PROMPT, 7])))
    assert {v.check for v in hierarchy.violations} == {"chain"}


def test_a_device_slot_freed_while_it_is_copied_is_found(make):
    hierarchy = make()
    Gate.is_open = False
    hierarchy.serve(PROMPT)
    (node, *_) = hierarchy.nodes_of(PROMPT)
    hierarchy.allocator.free(node.value[:3])
    hierarchy.process(hierarchy.prefill(hierarchy.request(tokens=[1, 2, 3])))
    assert {v.kind for v in hierarchy.violations} == {"free_in_flight"}
    assert {v.slot for v in hierarchy.violations} == set(node.value[:3].tolist())


def test_a_device_slot_freed_when_the_copy_is_over_is_fine(make):
    hierarchy = make()
    Gate.is_open = False
    hierarchy.serve(PROMPT)
    Gate.is_open = True
    hierarchy.push_out()
    hierarchy.process(hierarchy.prefill(hierarchy.request(tokens=[1, 2, 3])))
    assert hierarchy.violations == []


def test_a_host_slot_freed_while_it_is_filled_is_found(make):
    hierarchy = make()
    Gate.is_open = False
    hierarchy.serve(PROMPT)
    slots = torch.tensor(hierarchy.host_slots_of(PROMPT)[:2])
    hierarchy.host.free(slots)
    hierarchy.process(hierarchy.prefill(hierarchy.request(tokens=[1, 2, 3])))
    assert {(v.check, v.kind, v.tier) for v in hierarchy.violations} == {("ownership", "host_free_in_flight", "host")}
    assert {v.slot for v in hierarchy.violations} == set(slots.tolist())


@pytest.mark.parametrize("is_over", [False, True])
def test_a_host_slot_freed_while_it_is_loaded_is_found_and_later_it_is_not(make, is_over):
    hierarchy = make()
    hierarchy.serve(PROMPT)
    hierarchy.push_out()
    choose = hierarchy.controller.layer_done_counter.update_producer
    hierarchy.controller.layer_done_counter.update_producer = lambda choose=choose: (choose(), close_gate())[0]
    request = hierarchy.request(tokens=[*PROMPT, 7])
    launched = hierarchy.prefill(request)
    Gate.is_open = is_over
    hierarchy.host.free(torch.tensor(hierarchy.host_slots_of(PROMPT)[:2]))
    hierarchy.process(launched)
    hierarchy.process(hierarchy.decode())
    assert {v.kind for v in hierarchy.violations} == (set() if is_over else {"host_free_in_flight"})


def test_a_host_slot_freed_twice_is_found(make):
    hierarchy = make()
    hierarchy.serve(PROMPT)
    slots = torch.tensor(hierarchy.host_slots_of(PROMPT)[:1])
    hierarchy.transfers.note_free(slots)
    hierarchy.transfers.note_free(slots)
    hierarchy.process(hierarchy.prefill(hierarchy.request(tokens=[1, 2, 3])))
    assert [v.kind for v in hierarchy.violations] == ["host_double_free"]


def test_a_load_from_a_host_slot_that_was_given_back_is_found(make):
    hierarchy = make()
    hierarchy.serve(PROMPT)
    hierarchy.push_out()
    hierarchy.host.free(torch.tensor(hierarchy.host_slots_of(PROMPT)[:1]))
    hierarchy.process(hierarchy.prefill(hierarchy.request(tokens=[*PROMPT, 7])))
    assert {v.kind for v in hierarchy.violations} == {"host_slot_free", "host_slot_empty", "dead_slot"}


# What storage has filled


def fetch(hierarchy: Hierarchy, tokens: list[int], page_size: int = 1) -> list[int]:
    """A prefetch: host slots are filled with bytes from somewhere, and the tree takes them."""
    tree, controller = hierarchy.tree, hierarchy.controller
    controller.enable_storage = True
    slots = controller.mem_pool_host.alloc(len(tokens))
    controller.mem_pool_host.kv_buffer[:, :, slots] = torch.randn(2, 3, len(tokens), 2, 8).bfloat16()
    key = RadixKey(array("q", tokens))
    hashes = [str(n) for n in range(len(tokens) // page_size)]
    assert tree._insert_helper_host(tree.root_node, key, slots, hashes) == 0
    return slots.tolist()


@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_from_storage_get_a_record_when_they_are_loaded(make, page_size):
    hierarchy = make(page_size=page_size, size=192)
    fetch(hierarchy, PROMPT, page_size)
    hierarchy.process(hierarchy.prefill(first := hierarchy.request(tokens=[*PROMPT, 7, 8])))
    assert len(first.prefix_indices) >= len(PROMPT)
    hierarchy.process(hierarchy.decode(), finish=[first])
    hierarchy.serve([*PROMPT, 9])  # somebody else, who is checked against that record
    idle_through(hierarchy)
    hierarchy.push_out()
    hierarchy.serve([*PROMPT, 10])
    idle_through(hierarchy)
    assert hierarchy.violations == []


def test_pages_from_storage_join_those_of_the_device(make):
    """The first half was computed here, the second comes from storage; both are loaded together."""
    hierarchy = make(size=192)
    hierarchy.serve(PROMPT[:24], steps=0)
    hierarchy.push_out()
    (node,) = hierarchy.nodes_of(PROMPT[:24])
    tail = PROMPT[24:]
    hierarchy.controller.enable_storage = True
    slots = hierarchy.host.alloc(len(tail))
    hierarchy.tree._insert_helper_host(node, RadixKey(array("q", tail)), slots, [str(n) for n in tail])
    request = hierarchy.request(tokens=[*PROMPT, 7])
    hierarchy.process(hierarchy.prefill(request))
    _, loads = zip(*hierarchy.transfers.landed, strict=True)
    assert sorted((load.is_new, len(load.slots)) for load in loads) == [(False, 24), (True, 24)]
    hierarchy.process(hierarchy.decode(), finish=[request])
    idle_through(hierarchy)
    assert hierarchy.violations == []


def test_damage_after_pages_came_from_storage_is_found(make):
    hierarchy = make()
    fetch(hierarchy, PROMPT)
    request = hierarchy.request(tokens=[*PROMPT, 7])
    hierarchy.process(hierarchy.prefill(request))
    slot = hierarchy.slots_of(request)[11]
    hierarchy.pool.k_buffer[1][slot, 0, 0] += 1
    idle_through(hierarchy)
    (violation,) = hierarchy.violations
    assert (violation.check, violation.slot, violation.layer, violation.tier) == ("content", slot, 1, "device")


def test_a_load_from_storage_for_nobody_is_said_loudly(make):
    """Without the request nobody knows the tokens: the guard leaves rather than guess."""
    hierarchy = make()
    fetch(hierarchy, PROMPT)
    hierarchy.controller.load(torch.tensor(hierarchy.host_slots_of(PROMPT)), node_id=1)
    hierarchy.controller.start_loading()
    assert hierarchy.session.guard is None
    assert [name for name, _ in hierarchy.reporter.events] == ["detached"]


def test_without_content_the_records_travel_all_the_same(make):
    hierarchy = make(checks=("chain", "ownership"))
    assert serve_some(hierarchy, seed=3, rounds=40) > 0
    assert hierarchy.violations == []


def test_a_load_that_no_forward_used_is_compared_by_the_idle_pass(make):
    hierarchy = make()
    hierarchy.serve(PROMPT)
    hierarchy.push_out()
    request = hierarchy.request(tokens=[*PROMPT, 7])
    request.init_next_round_input(hierarchy.tree)
    hierarchy.host.kv_buffer[0, 0, hierarchy.host_slots_of(PROMPT)[6]] += 1
    hierarchy.tree.init_load_back(SimpleNamespace(best_match_node=request.best_match_node, mem_quota=None, req=request))
    hierarchy.tree.ready_to_load_host_cache()
    for load in hierarchy._coming:
        load()
    hierarchy._coming.clear()
    hierarchy.guard.idle()
    (violation,) = hierarchy.violations
    assert (violation.phase, violation.position, violation.hop) == ("load", 6, TO_HOST)


@pytest.mark.parametrize("seed", range(3))
def test_random_damage_in_host_memory_is_always_found(make, seed):
    """Whatever bit of whatever slot: found at the load, at that position, and nothing else."""
    rng = random.Random(seed)
    hierarchy = make()
    for _ in range(12):
        tokens = [rng.randrange(1000) for _ in range(40)]
        hierarchy.serve(tokens)
        hierarchy.push_out()
        position, layer, half = rng.randrange(40), rng.randrange(3), rng.randrange(2)
        row = (
            hierarchy.host.kv_buffer[half, layer, hierarchy.host_slots_of(tokens)[position]].view(torch.int16).view(-1)
        )
        row[rng.randrange(len(row))] ^= 1 << rng.randrange(15)
        hierarchy.serve([*tokens, 1])
        violation = hierarchy.violations[-1]
        assert (violation.check, violation.phase, violation.position) == ("content", "load", position)
        assert (violation.layer, violation.half, violation.tier) == (layer, "KV"[half], "host")
        hierarchy.flush()
    assert len(hierarchy.violations) == 12


def test_the_same_damage_is_one_report_however_often_it_is_loaded(make):
    hierarchy = make()
    hierarchy.serve(PROMPT)
    hierarchy.push_out()
    hierarchy.host.kv_buffer[0, 0, hierarchy.host_slots_of(PROMPT)[6]] += 1
    for last in (7, 8, 9):
        hierarchy.serve([*PROMPT, last])
        idle_through(hierarchy)
        hierarchy.push_out()
    (violation,) = hierarchy.violations
    assert violation.phase == "load"
    assert hierarchy.reporter.counts["content"] >= 6  # each time at the load, and by the rotating pass


# What is refused


class MHATokenToKVPool: ...


class MLATokenToKVPoolFP4(MHATokenToKVPool): ...


class MHATokenToKVPoolHost: ...


class MambaPoolHost: ...


class HiCacheController:
    def __init__(self, pool: object, host: object, entries: tuple[object, ...] = ()) -> None:
        self.mem_pool_device = pool
        self.mem_pool_host = host if not entries else SimpleNamespace(
            anchor_entry=SimpleNamespace(host_pool=host), entries=entries
        )  # fmt: skip


class HybridCacheController(HiCacheController): ...


def test_only_plain_pools_are_followed():
    assert gaps_of(MHATokenToKVPool()) == []
    (gap,) = gaps_of(MLATokenToKVPoolFP4())
    assert gap.startswith("--enable-hierarchical-cache is not covered yet for KV pool MLATokenToKVPoolFP4")


def test_devices_on_which_nobody_has_seen_it_are_refused():
    (gap,) = gaps_of(MHATokenToKVPool(), device="xpu:1")
    assert gap.startswith("--enable-hierarchical-cache is not covered yet on a device xpu (")


def gaps_of(pool: Any, device: str = "cpu") -> list[str]:
    pool.device = device
    return list_pool_gaps(SimpleNamespace(token_to_kv_pool=pool))


def test_what_a_controller_copies_decides():
    pool, host, known = MHATokenToKVPool(), MHATokenToKVPoolHost(), ("HiCacheController",)
    assert list_host_gaps(HiCacheController(pool, host), known) == []
    assert list_host_gaps(HiCacheController(pool, host, entries=(1,)), known) == []
    refused = [
        (HybridCacheController(pool, host), "cache controller HybridCacheController"),
        (HiCacheController(MLATokenToKVPoolFP4(), host), "KV pool MLATokenToKVPoolFP4"),
        (HiCacheController(pool, MambaPoolHost()), "host pool MambaPoolHost"),
        (HiCacheController(pool, host, entries=(1, 2)), "more than one host pool"),
    ]
    for controller, words in refused:
        (gap,) = list_host_gaps(controller, known)
        assert words in gap


@pytest.mark.parametrize("allowed", [False, True])
def test_a_host_pool_that_is_not_covered_stops_the_start_unless_allowed(make, allowed):
    hierarchy = make(allow_uncovered=allowed)
    session, stop = (
        hierarchy.session,
        nullcontext() if allowed else pytest.raises(UncoveredError, match="no such thing"),
    )
    with stop:
        session.hierarchy.open(hierarchy.allocator, hierarchy.host, bool, ["no such thing"], 1)
    assert session.guard is None


def test_a_host_pool_of_another_allocator_is_nobodys_concern(make):
    hierarchy = make()
    kept = hierarchy.transfers
    hierarchy.session.hierarchy.open(object(), object(), bool, ["no such thing"], 1)
    assert hierarchy.transfers is kept


def test_a_pool_with_more_than_one_space_is_refused():
    engine = WindowEngine()
    with pytest.raises(GuardError, match="more than one space"):
        engine.guard.open_host(SimpleNamespace(size=8), bool, 1)
