"""The ledger on SGLang's own allocators, rows, requests and trees: silent whenever the bookkeeping is right."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from kvcanary_plugin.kernels import ledger as g
from kvcanary_plugin.kernels.backend import NUMPY, REFERENCE
from tests.bookkeeping import VOCABULARY, Bookkeeping


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


def states(books: Bookkeeping, slots) -> set[g.State]:
    return {g.state_of(word) for word in books.ledger.words[torch.tensor(slots)].tolist()}


def test_a_request_from_prompt_to_tree(make, page_size):
    books = make(page_size=page_size)
    request = books.request(40)
    books.process(books.prefill(request))
    books.step_through(request, steps=9)
    slots = books.slots_of(request)
    aligned = 40 // page_size * page_size
    assert states(books, slots[:aligned]) == {g.State.CACHED}
    assert states(books, slots[aligned:]) == {g.State.OWNED}
    books.process(books.decode(request), finish=[request])
    other = books.request(5)
    books.process(books.prefill(other))
    kept = 50 // page_size * page_size
    assert states(books, slots[:kept]) == {g.State.CACHED}
    assert set(slots[kept:]) <= set(torch.nonzero(books.ledger.words & 3 == 0).flatten().tolist()) | set(
        books.slots_of(other)
    )
    assert books.findings == []


def test_overlap_frees_and_inserts_what_the_next_forward_still_writes(make, page_size, tree):
    books = make(page_size=page_size, tree=tree)
    one, two = books.request(20), books.request(31)
    books.process(books.prefill(one, two))
    for _ in range(20):
        ahead = books.decode(one, two)
        behind = books.decode(one, two)  # launched before the result of the step ahead is looked at
        books.process(ahead)
        books.process(behind)
    ahead = books.decode(one, two)
    behind = books.decode(one, two)
    books.process(ahead, finish=[one])
    last = books.decode(two)
    books.process(behind)
    books.process(last, finish=[two])
    again = books.request(tokens=list(one.origin_input_ids) + list(one.output_ids))
    books.process(books.prefill(again))
    books.step_through(again, steps=3)
    assert books.findings == []


def test_chunks_are_stashed_while_they_are_written(make, page_size, tree):
    books = make(page_size=page_size, tree=tree)
    long, short = books.request(150), books.request(10)
    books.process(books.prefill(short))
    pending = books.prefill(long, upto=50)
    for upto in (100, 150):
        books.stash(long)
        chunk = books.prefill(long, upto=upto)
        books.process(pending)
        pending = chunk
        books.step_through(short)
    books.process(pending)
    books.step_through(long, short, steps=4)
    assert books.findings == []


def test_duplicates_are_freed_and_replaced_in_their_row(make, page_size):
    books = make(page_size=page_size)
    prompt = [7] * 64
    twins = [books.request(tokens=[*prompt, index]) for index in range(4)]
    books.process(books.prefill(*twins))
    books.step_through(*twins, steps=3)
    first = books.slots_of(twins[0])[:64]
    assert all(books.slots_of(twin)[:64] == first for twin in twins)
    for twin in twins:
        books.process(books.decode(), finish=[twin])
    assert books.findings == []


def test_aborts_retractions_and_flushes(make, page_size, tree):
    books = make(page_size=page_size, tree=tree)
    for _ in range(4):
        one, two, three = (books.request(length) for length in (33, 48, 17))
        books.process(books.prefill(one, two, three))
        books.step_through(one, two, three, steps=2)
        ahead = books.decode()
        books.retract(two)
        behind = books.decode(one, three)
        books.process(ahead)
        books.finish(three, insert=False)
        books.process(behind)
        books.process(books.prefill(two))
        books.step_through(steps=2)
        books.process(books.decode(), finish=[one, two])
        books.flush()
    assert books.findings == []
    books.process(books.prefill(books.request(3)))
    assert int((books.ledger.words & 3 != 0).sum()) == 3


def test_a_chunk_is_aborted_after_its_start_was_inserted(make, page_size):
    books = make(page_size=page_size)
    long = books.request(100)
    pending = books.prefill(long, upto=37)
    books.stash(long)
    chunk = books.prefill(long, upto=70)
    books.process(pending)
    books.process(chunk)
    books.finish(long, insert=False)
    books.process(books.prefill(books.request(100)))
    assert books.findings == []


def test_eviction_by_pressure(make, page_size):
    books = make(page_size=page_size, size=128)
    for _ in range(12):
        request = books.request(60)
        books.process(books.prefill(request))
        books.process(books.decode(request), finish=[request])
    assert books.findings == []
    books.tree.evict(EvictParams(num_tokens=1000))
    books.process(books.prefill(books.request(1)))
    assert int((books.ledger.words & 3 != 0).sum()) == 1


def test_a_window_moves_on(make, page_size):
    books = make(page_size=page_size, tree="chunk", window=32)
    request = books.request(40)
    books.process(books.prefill(request))
    for _ in range(40):
        length = request.kv_committed_len
        dead = (length - 32) // page_size * page_size
        books.allocator.free_swa(books.rows.req_to_token[request.req_pool_idx, :dead])
        books.process(books.decode(request))
    books.process(books.decode(request), finish=[request])
    books.process(books.prefill(books.request(40)))
    assert books.findings == []


def test_rows_are_looked_at_again_when_they_must_be(make, monkeypatch):
    """On a CPU whose rows were verified: a row once checked is left alone until a slot is freed, and now and then."""
    books = make(rows_are_sound=True)
    looked = []
    backend = books.ledger._backend

    def spy(**arguments):
        looked.append(books.step)
        backend.check_reads(**arguments)

    monkeypatch.setattr(books.ledger, "_backend", dataclasses.replace(backend, check_reads=spy))
    one, two = books.request(20), books.request(20)
    books.process(books.prefill(one, two))  # step 1: whatever a row has from here on, its own forwards have claimed
    books.step_through(one, two, steps=9)
    assert looked == [1]
    books.process(books.decode(one, two), finish=[two])  # step 11: frees ahead of step 12
    books.step_through(one, steps=3)
    three = books.request(5)
    books.process(books.prefill(three))  # step 15
    books.step_through(one, three, steps=60)
    assert looked == [1, 15, 64]
    assert books.findings == []


def test_what_it_keeps_fits_its_share(make, page_size):
    books = make(page_size=page_size, size=65536)
    assert books.ledger.resident_bytes / books.records.slot_count < 9.2
    for _ in range(300):
        request = books.request(230)
        books.process(books.prefill(request))
        books.finish(request, insert=False)
    kept = books.ledger.history.look_back()
    assert len(kept._slots) <= books.records.slot_count // 8


@pytest.mark.parametrize(
    ("backend", "rows_are_sound"),
    [(NUMPY, True), (NUMPY, False), (REFERENCE, False)],
    ids=["trusting", "numpy", "torch"],
)
@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])
def test_a_random_day(make, page_size, tree, overlap, backend, rows_are_sound):
    """Mixed lengths, shared prefixes, chunks, aborts, retraction, pressure and flushes, in every order."""
    rng = random.Random(f"{page_size}{tree}{overlap}")
    books = make(page_size=page_size, tree=tree, size=640, backend=backend, rows_are_sound=rows_are_sound)
    prefixes = [[rng.randrange(VOCABULARY) for _ in range(rng.choice([16, 31, 32, 33, 48]))] for _ in range(3)]
    waiting, pending, chunked = [], [], None
    for _ in range(150):
        room = books.allocator.available_size() + books.tree.evictable_size()
        if rng.random() < 0.3 and len(books.running) < 8 and room > 300 and chunked is None:
            fresh = waiting or [
                books.request(tokens=rng.choice(prefixes) + [rng.randrange(9) for _ in range(rng.randrange(1, 40))])
                for _ in range(rng.randrange(1, 4))
            ]
            waiting = []
            batch = books.prefill(*fresh)
        elif rng.random() < 0.1 and chunked is None and room > 300:
            chunked = books.request(rng.randrange(60, 120))
            batch = books.prefill(chunked, upto=30)
        elif chunked is not None and rng.random() < 0.5:
            books.stash(chunked)
            end = chunked.kv_committed_len + 30
            batch = books.prefill(chunked, upto=end)
            if end >= len(chunked.origin_input_ids):
                chunked = None
        elif [request for request in books.running if request is not chunked]:
            batch = books.decode(*[request for request in books.running if request is not chunked])
        else:
            continue
        pending.append(batch)
        while len(pending) > (1 if overlap else 0):
            done = pending.pop(0)
            ends = [q for q in done.requests if q is not chunked and q.inflight_middle_chunks == 0]
            books.process(done, finish=[q for q in ends if rng.random() < 0.15 or q.kv_committed_len > 200])
        settled = [q for q in books.running if q is not chunked and all(q not in batch.requests for batch in pending)]
        if settled and rng.random() < 0.1:
            books.finish(rng.choice(settled), insert=False)
        decoding = [q for q in books.running if q is not chunked and len(q.output_ids)]
        if decoding and rng.random() < 0.1:
            retracted = rng.choice(decoding)
            books.retract(retracted)
            waiting.append(retracted)
        if rng.random() < 0.05 and chunked is None:
            while pending:
                done = pending.pop(0)
                books.process(done, finish=done.requests)
            for request in list(books.running):
                books.finish(request)
            books.flush()
    assert books.findings == []
    assert books.step > 60
