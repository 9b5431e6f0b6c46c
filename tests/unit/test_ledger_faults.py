"""Each way to break the bookkeeping of slots is reported ahead of the next forward, with both requests."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvcanary_plugin.faults.ownership import OWNERSHIP_FAULTS
from tests.bookkeeping import Bookkeeping


@pytest.fixture(params=["radix", "chunk"])
def tree(request):
    return request.param


@pytest.fixture
def make():
    made = []

    def build(**options) -> Bookkeeping:
        made.append(Bookkeeping(**options))
        return made[-1]

    yield build
    for books in reversed(made):
        books.close()


@pytest.fixture(params=[False, True], ids=["", "trusting"])
def books(make, page_size, request):
    """Two requests, r1 and r2, some steps into their answers."""
    books = make(page_size=page_size, rows_are_sound=request.param)
    one, two = books.request(40), books.request(24)
    books.process(books.prefill(one, two))
    books.step_through(steps=6)
    assert books.findings == []
    return books


def distrust(books: Bookkeeping) -> None:
    """What the guard does once the chain check has something to say, as it has of most entries that were changed."""
    books.rows_are_sound = False


def own_slot(books: Bookkeeping, index: int) -> tuple[int, int]:
    """A slot that a running request stored to after its prompt, and its position."""
    request = books.running[index]
    position = request.kv_committed_len - 3
    return books.slots_of(request)[position], position


def make_next(books: Bookkeeping, slot: int) -> None:
    """Let the allocator give out ``slot``, or its page, next."""
    allocator = books.allocator
    page = slot // books.page_size
    rest = allocator.free_pages[allocator.free_pages != page]
    allocator.free_pages = torch.cat([torch.tensor([page]), rest])


def seen(books: Bookkeeping) -> list[tuple]:
    return [(f.kind, f.slot, f.request, f.owner) for f in books.findings]


def test_a_live_slot_is_freed_and_taken_by_another_request(books):
    slot, position = own_slot(books, 0)
    books.allocator.free(torch.tensor([slot]))
    make_next(books, slot)
    books.prefill(books.request(books.page_size))
    freed = books.findings[0]
    assert (freed.kind, freed.slot, freed.phase, freed.owner) == ("free_in_use", slot, "free", "r1")
    assert "called for no request" in freed.evidence
    assert "by now r3 row 3 has it" in freed.evidence
    assert len(books.findings) == 1
    books.findings.clear()
    books.decode(*books.running[:2])
    reads = [f for f in books.findings if f.slot == slot]
    assert [(f.kind, f.request, f.position, f.owner) for f in reads] == [("foreign_slot", "r1", position, "r3")]


def test_a_live_slot_is_freed_and_nobody_has_taken_it(books):
    slot, _ = own_slot(books, 0)
    books.allocator.free(torch.tensor([slot]))
    books.process(books.decode())
    assert ("free_in_use", slot, None, "r1") in seen(books)
    assert ("freed_slot", slot, "r1", "r1") not in seen(books)
    books.process(books.decode())
    assert ("freed_slot", slot, "r1", "r1") in seen(books)


def test_the_allocator_gives_out_a_slot_that_is_in_use(books):
    slot, _ = own_slot(books, 1)
    make_next(books, slot)
    books.process(books.prefill(books.request(books.page_size)))
    assert [f for f in seen(books) if f[1] == slot] == [("double_alloc", slot, "r3", "r2")]
    assert {f.kind for f in books.findings} == {"double_alloc"}


def test_the_allocator_gives_out_a_slot_of_the_tree(books):
    slot = books.slots_of(books.running[0])[0]
    make_next(books, slot)
    books.process(books.prefill(books.request(1)))
    finding = next(f for f in books.findings if f.slot == slot)
    assert (finding.kind, finding.request, finding.owner, finding.state) == (
        "double_alloc",
        "r3",
        "r1",
        "cached+contested",
    )


@pytest.mark.parametrize("grouped", [False, True])
def test_slots_are_freed_twice(make, page_size, tree, grouped):
    books = make(page_size=page_size, tree=tree)
    one = books.request(40)
    books.process(books.prefill(one))
    books.step_through(steps=3)
    slots = books.rows.req_to_token[one.req_pool_idx, 40:43].clone()
    books.process(books.decode(one))
    books.finish(one, insert=False)
    if grouped:
        books.allocator.free_group_begin()
    books.allocator.free(slots)
    if grouped:
        books.allocator.free_group_end()
    books.process(books.prefill(books.request(2)))
    assert {f.kind for f in books.findings} == {"double_free"}
    assert {f.slot for f in books.findings} == set(slots.tolist())
    assert {f.owner for f in books.findings} == {"r1"}
    evidence = books.findings[0].evidence
    assert any(line.startswith("freed") for line in evidence)


def test_one_call_frees_a_slot_twice(make):
    books = make()
    one = books.request(4)
    books.process(books.prefill(one))
    slots = torch.tensor(books.slots_of(one))
    books.finish(one)
    books.ledger.act_for_tree()
    books.allocator.free(torch.cat([slots[:2], slots[:1]]))
    books.ledger.stop_acting()
    books.process(books.prefill(books.request(1)))
    assert [(f.kind, f.slot) for f in books.findings] == [("double_free", int(slots[0]))]


@pytest.mark.parametrize("who", ["r1", None])
def test_a_slot_of_the_tree_is_freed(books, who):
    slot = books.slots_of(books.running[0])[0]
    if who:
        books.ledger.act_for_row(books.running[0].req_pool_idx)
    books.allocator.free(torch.tensor([slot]))
    books.ledger.stop_acting()
    books.process(books.prefill(books.request(1)))
    assert seen(books)[0] == ("free_in_tree", slot, who, "r1")


def test_the_tree_frees_what_a_running_request_reads(books):
    request = books.running[0]
    slot = books.slots_of(request)[0]
    books.tree.dec_lock_ref(request.last_node)  # one release too many
    books.tree.evict(EvictParams(num_tokens=1000))
    books.process(books.decode())
    found = [f for f in books.findings if f.slot == slot]
    assert [(f.kind, f.request, f.position) for f in found] == [("freed_slot", "r1", 0)]
    assert any(line.startswith("freed by the radix tree ahead of step") for line in found[0].evidence)


def test_the_tree_takes_free_slots(books):
    slots = torch.arange(200, 200 + 2 * books.page_size)
    slots += -int(slots[0]) % books.page_size
    key = RadixKey(token_ids=list(range(500, 500 + len(slots))), extra_key=None)
    books.tree.insert(InsertParams(key=key, value=slots))
    books.process(books.decode())
    assert {f.kind for f in books.findings} == {"insert_not_owned"}
    assert [f.slot for f in books.findings] == slots.tolist()


def test_the_tree_takes_slots_of_another_request(books):
    one, two = books.running
    theirs = torch.tensor(books.slots_of(two)[24 // books.page_size * books.page_size :])
    if books.page_size > 1:
        theirs = torch.arange(theirs[0], theirs[0] + books.page_size)
    key = RadixKey(token_ids=list(range(500, 500 + len(theirs))), extra_key=None)
    books.ledger.act_for_row(one.req_pool_idx)
    books.tree.insert(InsertParams(key=key, value=theirs))
    books.ledger.stop_acting()
    books.process(books.decode())
    assert ("insert_not_owned", int(theirs[0]), "r1", "r2") in seen(books)


def test_a_row_names_a_slot_of_another_request(books):
    one, two = books.running
    slot, position = own_slot(books, 1)
    books.rows.req_to_token[one.req_pool_idx, 5] = slot
    distrust(books)
    books.process(books.decode())
    assert [(f.kind, f.slot, f.position, f.request, f.owner) for f in books.findings] == [
        ("foreign_slot", slot, 5, "r1", "r2")
    ]
    assert position != 5
    assert two.rid == "r2"


def test_old_entries_come_back_to_a_row(books):
    one, two = books.running
    old = books.rows.req_to_token[two.req_pool_idx].clone()
    length = two.kv_committed_len
    first = 24 // books.page_size * books.page_size
    books.retract(two)
    books.process(books.decode(one))
    books.rows.req_to_token[one.req_pool_idx, first:length] = old[first:length]
    distrust(books)
    books.process(books.decode(one))
    assert {f.kind for f in books.findings} == {"freed_slot"}
    assert {f.slot for f in books.findings} == set(old[first:length].tolist())
    assert {(f.request, f.owner) for f in books.findings} == {("r1", "r2")}


@pytest.mark.parametrize("target", ["free", "another's", "cached", "padding", "last", "tail"])
def test_a_forward_stores_outside_the_slots_it_owns(books, target):
    one, two = books.running
    foreign, _ = own_slot(books, 1)
    where = {
        "free": books.page_size * int(books.allocator.free_pages[-1]),
        "another's": foreign,
        "cached": books.slots_of(two)[0],
        "padding": 0,
        "last": -1,  # what an index of -1 makes of a buffer
        "tail": books.slots_of(one)[-1] + 2,  # the next one is the forward's
    }[target]
    if target == "tail" and books.page_size == 1:
        pytest.skip("a page of one slot has no tail")

    def redirect(slots: torch.Tensor) -> torch.Tensor:
        slots = slots.clone()
        slots[0] = where
        return slots

    books.decode(slots_of=redirect)
    finding = books.findings[0]
    owner = {"another's": "r2", "cached": "r2"}.get(target)
    assert [(f.kind, f.slot, f.phase, f.request) for f in books.findings] == [("write_not_owned", where, "write", "r1")]
    if owner:
        assert finding.owner == owner
    if target == "tail":
        assert "the slot lies behind the end of the request in its last page" in finding.evidence


def test_two_tokens_go_to_one_slot(books):
    books.decode(slots_of=lambda slots: slots[[1, 1]])
    assert [(f.kind, f.request, f.owner) for f in books.findings] == [("write_twice", "r2", "r1")]


def test_what_a_group_frees_has_changed_by_its_end(make, page_size):
    """The queued tensor is a view of a row, and the row is given the tree's slots before the group ends."""
    books = make(page_size=page_size)
    one, two = books.request(40), books.request(40)
    books.process(books.prefill(one, two))
    books.step_through(steps=2 * page_size)
    kept = 40 // page_size * page_size
    row = books.rows.req_to_token[two.req_pool_idx]
    books.allocator.free_group_begin()
    books.allocator.free(row[kept : kept + page_size])
    mine = row[kept : kept + page_size].clone()
    row[kept : kept + page_size] = torch.tensor(books.slots_of(one)[:page_size]).int()
    books.allocator.free_group_end()
    books.process(books.decode(one))
    assert {f.kind for f in books.findings if f.phase == "free"} == {"free_in_tree"}
    assert not {f.slot for f in books.findings} & set(mine.tolist())


def test_the_window_part_of_a_slot_is_freed_within_the_window(make, page_size):
    books = make(page_size=page_size, tree="chunk", window=32)
    request = books.request(80)
    books.process(books.prefill(request))
    books.allocator.free_swa(books.rows.req_to_token[request.req_pool_idx, :64])
    books.process(books.decode(request))
    positions = [f.position for f in books.findings]
    assert {f.kind for f in books.findings} == {"trimmed_slot"}
    assert positions == list(range(48, 64))


def test_quarantined_slots_are_not_read_again(books):
    one = books.running[0]
    slots = books.slots_of(one)[: books.page_size]
    books.ledger.quarantine(torch.tensor(slots))
    books.process(books.decode(one))
    assert books.findings == []  # it is the owner's own damage, and was reported
    books.process(books.prefill(books.request(tokens=list(one.origin_input_ids))))
    assert {(f.kind, f.request) for f in books.findings} == {("quarantined_slot", "r3")}
    books.findings.clear()
    for request in list(books.running):
        books.finish(request)
    books.tree.evict(EvictParams(num_tokens=1000))
    books.ledger.apply(books.step, books.violations)
    assert int(books.violations.count) == 0
    assert (books.ledger.words[torch.tensor(slots)] & 3 == 3).all()


def test_a_slot_is_freed_while_a_transfer_uses_it(books):
    one, two = books.running
    for request, is_over in ((one, False), (two, True)):
        slots = books.slots_of(request)[-2:]
        books.ledger.hold(torch.tensor(slots))
        if is_over:
            books.ledger.land(torch.tensor(slots))
        books.finish(request, insert=False)
        books.process(books.prefill(books.request(1)))
        expected = set() if is_over else {("free_in_flight", slot) for slot in slots}
        assert {(f.kind, f.slot) for f in books.findings} == expected
        books.findings.clear()


def test_the_strip_shows_the_neighbours(make):
    books = make()
    one = books.request(4)
    books.process(books.prefill(one))
    books.step_through(one, steps=2)
    books.rows.req_to_token[one.req_pool_idx, 1] = 9
    books.process(books.decode(one))
    (finding,) = books.findings
    assert finding.neighbours == "ccccooo.[.]........"


def test_a_flood_is_told_in_bounded_time(make):
    books = make(size=2048)
    requests = [books.request(200) for _ in range(8)]
    books.process(books.prefill(*requests))
    for request in requests:
        books.rows.req_to_token[request.req_pool_idx, :200] = torch.arange(1700, 1900).int()
    books.decode()
    assert len(books.findings) == 256
    assert [bool(f.evidence or f.neighbours) for f in books.findings] == [True] * 32 + [False] * 224


@pytest.mark.parametrize("name", OWNERSHIP_FAULTS)
def test_the_named_faults(make, page_size, name):
    """Each is found in its own forward, where it says, and leaves nothing behind."""
    books = make(page_size=page_size)
    gone, one, two = books.request(20), books.request(40), books.request(30)
    books.process(books.prefill(gone, one, two))
    books.step_through(steps=5)
    long = books.request(100)
    books.process(books.prefill(long, upto=48))
    books.finish(gone, insert=False)
    books.step_through(one, two)
    books.stash(long)
    assert books.findings == []
    pool = SimpleNamespace(allocator=books.allocator, req_to_token=books.rows.req_to_token, page_size=page_size)
    space = SimpleNamespace(apply_changes=lambda: None, violations=books.violations)
    guard = SimpleNamespace(pool=pool, ledger=books.ledger, records=books.records, spaces=[space])
    done = []

    def strike(step):
        done.append(OWNERSHIP_FAULTS[name](guard, step, random.Random(4), {}))
        return done[0].restore

    books.strike = strike
    books.process(books.prefill(long) if name == "abort_chunk" else books.decode(one, two))
    (injected,) = done
    assert injected.check == "ownership"
    named = {(f.slot, f.request or f.owner) for f in books.findings}
    # A page is freed, and given out, as a whole.
    assert set(injected.slots) <= {slot for slot, _ in named}
    if name not in ("foreign_entry", "stale_entry", "stale_row"):  # these are told by their first entry
        assert {slot // page_size for slot, _ in named} == {slot // page_size for slot in injected.slots}
    if "request" in injected.fields:
        assert {who for _, who in named} >= {injected.fields["request"]}
    if "other" in injected.fields:
        assert {f.owner for f in books.findings} == {injected.fields["other"]}
    # What was freed is also missing where it is read.
    assert KINDS[name] <= {f.kind for f in books.findings} <= KINDS[name] | {"freed_slot"}
    books.findings.clear()
    if name != "abort_chunk":
        books.process(books.prefill(long))
    books.step_through(steps=4)
    books.process(books.decode(), finish=[one, two, long])
    books.process(books.prefill(books.request(100)))
    assert books.findings == []


KINDS = {
    "free_running": {"free_in_use"},
    "free_cached": {"free_in_tree"},
    "free_twice": {"double_free"},
    "alloc_taken": {"double_alloc"},
    "release_early": {"free_in_use", "write_not_owned"},
    "abort_chunk": {"free_in_tree"},
    "foreign_entry": {"foreign_slot"},
    "stale_entry": {"freed_slot"},
    "stale_row": {"freed_slot"},
}
