"""Long contexts and large pools on the real pool, allocator, request table and Req: rows of a million tokens, a
thousand requests at once, 2^24 slots, and numbers near the end of what their bits hold.
"""

from __future__ import annotations

import time
import tracemalloc
from array import array

import numpy as np
import pytest
import torch

from kvcanary_plugin.config import Config
from kvcanary_plugin.errors import GuardError, UncoveredError
from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.mixing import mix_int
from kvcanary_plugin.pool_patcher.adapters import adapt_pool
from kvcanary_plugin.runtime.guard import Guard
from kvcanary_plugin.runtime.refinement import MAX_STRETCHES
from kvcanary_plugin.runtime.truth import TruthTable, true_chains
from tests.engine import ListReporter
from tests.large import LARGE_POOL, MILLION, LargeEngine
from tests.unit.test_truth import Request


@pytest.fixture(scope="module")
def long_row() -> tuple[LargeEngine, object]:
    """A request of a million tokens at the very end of a pool of 2^24 slots. Tests undo what they do to it."""
    engine = LargeEngine(size=LARGE_POOL)
    engine.leave(MILLION + 40)
    request = engine.request(MILLION)
    engine.prefill_in_chunks(request)
    engine.run(request, steps=2)
    assert engine.violations == []
    return engine, request


def test_a_million_tokens_are_silent(long_row):
    engine, request = long_row
    before = len(engine.violations)
    assert engine.slot_of(request, MILLION) > LARGE_POOL - 64
    engine.run(request, steps=2)
    engine.settle_scrub()

    assert engine.violations[before:] == []
    assert engine.guard.verified > 8 * MILLION


@pytest.mark.parametrize("position", [1, MILLION // 2, MILLION - 2])
def test_swapped_entries_of_a_long_row_are_found(long_row, position):
    engine, request = long_row
    before = len(engine.violations)
    engine.swap(request, position, position + 1)
    engine.decode(request)
    engine.swap(request, position, position + 1)
    places = [engine.slot_of(request, position + 1), engine.slot_of(request, position)]

    assert engine.found_since(before) == {
        ("chain", "position", slot, at) for slot, at in zip(places, (position, position + 1), strict=True)
    }


def test_a_wrong_record_far_into_a_row_is_found(long_row):
    engine, request = long_row
    before, position = len(engine.violations), MILLION - 7
    slot = engine.slot_of(request, position)
    engine.guard.records.hot[slot, r.CHAIN] ^= 1 << 40
    engine.decode(request)
    engine.guard.records.hot[slot, r.CHAIN] ^= 1 << 40
    (violation,) = engine.violations[before:]

    assert (violation.check, violation.kind, violation.slot, violation.position) == ("chain", "link", slot, position)
    assert violation.expected_hash == int(engine.guard.records.hot[slot, r.CHAIN]) % (1 << 64)
    assert violation.expected_token == violation.stored_token == request.origin_input_ids[position]


def test_half_a_million_wrong_records_are_as_many_reports_as_can_be_read(long_row):
    engine, request = long_row
    before = len(engine.violations)
    slots = engine.rows.req_to_token[request.req_pool_idx, :MILLION:2].long()
    hidden = sum(fields["hidden"] for name, fields in engine.reporter.events if name == "more")
    engine.guard.records.hot[slots, r.CHAIN] ^= 1 << 40
    start = time.perf_counter()
    engine.decode(request)
    seconds = time.perf_counter() - start
    engine.guard.records.hot[slots, r.CHAIN] ^= 1 << 40
    found = engine.violations[before:]

    assert {(violation.check, violation.kind) for violation in found} == {("chain", "link")}
    assert 0 < len(found) <= MAX_STRETCHES
    assert [violation.position for violation in found] == list(range(0, 2 * len(found), 2))
    more = sum(fields["hidden"] for name, fields in engine.reporter.events if name == "more")
    assert more - hidden > MILLION // 4, "and the rest is counted"
    assert seconds < 20, "less than one on two busy cores"


def test_a_flipped_bit_in_one_of_the_last_slots_is_found(long_row):
    engine, request = long_row
    before, position = len(engine.violations), MILLION + 1
    slot = engine.slot_of(request, position)
    row = engine.pool.k_buffer[0].view(torch.int16)[slot]
    row[0, 3] ^= 1
    engine.settle_scrub()
    row[0, 3] ^= 1
    (violation,) = engine.violations[before:]

    assert (violation.check, violation.slot, violation.position) == ("content", slot, position)
    assert (violation.layer, violation.half) == (0, "K")
    assert violation.writer.request == request.rid


def test_a_slot_freed_under_a_long_row_is_found(long_row):
    engine, request = long_row
    before, position = len(engine.violations), MILLION - 100
    slot = engine.slot_of(request, position)
    words = engine.guard.ledger.words
    word = int(words[slot])
    engine.guard.ledger.note_free(torch.tensor([slot]))
    engine.decode(request)
    words[slot] = word
    found = engine.found_since(before)

    assert found, "a slot that the row names was freed"
    assert {(check, at_slot) for check, _, at_slot, _ in found} == {("ownership", slot)}


@pytest.mark.parametrize(
    ("options", "layer_rows"),
    [({}, "v_buffer"), ({"page_size": 64}, "v_buffer"), ({"latent": 8}, "kv_buffer")],
    ids=["tokens", "pages", "latent"],
)
def test_a_bit_in_the_last_of_sixteen_million_slots_is_found(options, layer_rows):
    engine = LargeEngine(size=LARGE_POOL - 1, context=256, **options)  # so that 2^24 - 1 is a slot of the last page
    engine.leave(3 * 64)
    request = engine.request(3 * 64 - 2)
    engine.prefill(request, upto=256)
    engine.run(request, steps=2)
    last = int(engine.slots_of(request).max())
    position = engine.slots_of(request).tolist().index(last)
    assert engine.violations == []
    assert last >= LARGE_POOL - 1 - engine.page_size
    assert engine.guard.records.hot.shape[0] > last

    getattr(engine.pool, layer_rows)[0].view(torch.int16)[last, 0, 7] ^= 1
    engine.settle_scrub()
    (violation,) = engine.violations
    assert (violation.check, violation.slot, violation.position) == ("content", last, position)
    assert violation.writer.request == request.rid


def test_a_thousand_requests_decode_at_once():
    engine = LargeEngine(size=1 << 16, rows=1024)
    requests = [engine.request(length) for length in torch.arange(1024).remainder(40).add(1).tolist()]
    engine.prefill(*requests, upto=64)
    engine.run(*requests, steps=4)
    engine.settle_scrub()
    assert engine.violations == []

    last = max(requests, key=lambda request: (request.req_pool_idx, len(request.origin_input_ids)))
    assert last.req_pool_idx * engine.rows.req_to_token.stride(0) >= 1 << 30  # entries of its row: past 4 GiB
    engine.swap(last, 1, 2)
    engine.decode(*requests)
    assert engine.found_since(0) == {
        ("chain", "position", engine.slot_of(last, 1), 1),
        ("chain", "position", engine.slot_of(last, 2), 2),
    }
    assert {violation.request for violation in engine.violations} == {last.rid}


@pytest.mark.parametrize("number", [1 << 31, 1 << 32, (1 << 39) - 8])
def test_numbers_of_late_forwards_are_told(number):
    engine = LargeEngine(size=512, context=256)
    engine.guard.forwards = number - 4
    request = engine.request(20)
    engine.prefill(request, upto=20)
    engine.run(request, steps=6)
    assert engine.violations == []

    slot = engine.slot_of(request, 22)  # stored by the third of these decode steps
    engine.guard.records.hot[slot, r.CHAIN] ^= 1
    engine.decode(request)
    (violation,) = engine.violations
    assert (violation.step, violation.slot) == (number + 4, slot)
    assert (violation.writer.step, violation.writer.request) == (number, request.rid)


def at_the_last_position() -> tuple[TruthTable, Request]:
    """A row with all the tokens but one that positions allow, without the time it takes to get there."""
    table, request = TruthTable(4, ()), Request("long", range(r.POSITION_MASK - 1), [5, 6, 7, 8])
    table.advance([request], [1], [2])
    table._cohort = None
    table._lengths[1] = r.POSITION_MASK - 1
    return table, request


@pytest.mark.parametrize("is_even", [True, False], ids=["cohort", "each"])
def test_a_position_that_no_record_holds_is_refused(is_even):
    table, request = at_the_last_position()
    before = int(table._chains[1])
    truth = table.advance([request], [1], [r.POSITION_MASK], is_even=is_even)
    with pytest.raises(GuardError, match=f"'long' has {r.POSITION_MASK + 1} tokens; .* up to {r.POSITION_MASK}"):
        table.advance([request], [1], [r.POSITION_MASK + 1], is_even=is_even)
    last = r.POSITION_MASK - 1
    # The first token that was generated, at its position, and nothing of a neighbour's.
    expected = (before + word_hash(5, last)) % (1 << 64)
    assert int(table._chains[1]) == int(truth.chains[0]) == expected


def test_several_positions_that_no_record_holds_are_refused():
    table, request = at_the_last_position()
    with pytest.raises(GuardError, match=f"'long' has {r.POSITION_MASK + 2} tokens"):
        table.advance([request], [1], [r.POSITION_MASK + 2])


def word_hash(token: int, position: int) -> int:
    return mix_int(token | position << 32)


def test_rows_longer_than_positions_go_are_not_covered():
    engine = LargeEngine(size=64, context=256)
    guarded = adapt_pool(
        engine.pool,
        engine.allocator,
        torch.zeros(1, dtype=torch.int32).expand(2, r.POSITION_MASK + 1),
        "none",
        model="test",
    )
    with pytest.raises(UncoveredError, match=f"{r.POSITION_MASK + 1} positions are not covered.*--context-length"):
        Guard(guarded, Config(mode="log"), ListReporter())


def test_an_array_of_tokens_gives_the_chain_of_a_list():
    tokens = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(1)).tolist()
    whole = true_chains(Request("list", tokens), 7, len(tokens))
    kept = array("q", tokens[:70_000])
    split = true_chains(Request("array", kept, array("q", tokens[70_000:])), 7, len(tokens))

    assert np.array_equal(whole, split)
    assert kept.tolist() == tokens[:70_000]  # hashed in place, but not in the scheduler's
    assert int(whole[0]) == (7 + word_hash(tokens[0] % (1 << 32), 0)) % (1 << 64)
    assert (int(whole[-1]) - int(whole[-2])) % (1 << 64) == word_hash(tokens[-1] % (1 << 32), len(tokens) - 1)


def test_what_stays_resident_grows_with_slots_only():
    """Not with rows times context: a thousand rows of a million positions cost eight bytes a row."""
    small, large = (LargeEngine(size=size, context=64).guard.resident_bytes for size in (1 << 16, 1 << 20))
    assert (large - small) / ((1 << 20) - (1 << 16)) == 32 + 8 + 8 + 1  # record, writer, ledger word, history
    wide = LargeEngine(size=1 << 16, rows=1024).guard.resident_bytes
    assert wide - small == (1024 - 4) * 8


def test_memory_of_a_step_is_linear_in_what_it_reads():
    engine = LargeEngine(size=1 << 18, context=1 << 18)
    peaks = []
    for length in (1 << 15, 1 << 16, 1 << 17):
        request = engine.request(length)
        engine.prefill_in_chunks(request)
        engine.decode(request)
        tracemalloc.start()
        engine.decode(request)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        engine.finish(request)

    assert engine.violations == []
    assert peaks[1] / peaks[0] < 2.2
    assert peaks[2] / peaks[1] < 2.2
