"""What most likely happened, and what speaks for it."""

from __future__ import annotations

import pytest

from kvcanary_plugin.config import CHECKS
from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.report.text import quote_clause, render_block
from kvcanary_plugin.runtime.cause import guess_cause
from kvcanary_plugin.runtime.violation import EXPLANATIONS, Violation, Writer
from tests.engine import Engine


def start(**options):
    engine = Engine(checks=CHECKS, **options)
    one, other = engine.request(30), engine.request(25)
    engine.prefill(one, other)
    engine.run(one, other, steps=4)
    return engine, one, other


def first(engine: Engine, check: str) -> Violation:
    return next(violation for violation in engine.violations if violation.check == check)


@pytest.mark.parametrize("kind", EXPLANATIONS)
@pytest.mark.parametrize("writer", [None, Writer(3, 1, "a"), Writer(3, 1, "b")])
def test_every_kind_has_a_cause(kind: str, writer: Writer | None):
    violation = Violation("chain", kind, "rows", 0, 5, "read", 9, request="a", stored_position=4, writer=writer)
    cause, _ = guess_cause(violation)
    assert cause != "not known"


def test_a_slot_freed_under_its_request():
    engine, one, other = start()
    slots = engine.slots_of(one)[7:8]
    engine.guard.traffic.release(slots)
    engine.allocator.free(slots)
    engine.guard.ledger.note_free(slots)
    engine.decode(one, other)
    violation = first(engine, "chain")
    cause, evidence = guess_cause(violation)
    assert violation.kind == "dead_slot"
    assert cause == "the slot was freed while its own request still reads it"
    assert any(clause.startswith("freed") for clause in evidence)
    assert "[.]" in violation.neighbours


def test_exchanged_entries():
    engine, one, other = start()
    row = engine.rows.req_to_token[one.req_pool_idx]
    row[[3, 9]] = row[[9, 3]]
    engine.decode(one, other)
    cause, evidence = guess_cause(first(engine, "chain"))
    assert "exchanged or shifted" in cause
    assert "it holds position 9, stored by this request in step 1" in evidence


def test_a_slot_of_another_request():
    engine, one, other = start()
    engine.rows.req_to_token[one.req_pool_idx, 5] = engine.slots_of(other)[6].int()
    engine.decode(one, other)
    cause, evidence = guess_cause(first(engine, "chain"))
    assert "went to another request" in cause
    assert "position 6 of another request" in evidence[0]


def test_a_never_stored_entry():
    engine, one, other = start()
    engine.rows.req_to_token[one.req_pool_idx, 5] = 500
    engine.decode(one, other)
    cause, _ = guess_cause(first(engine, "chain"))
    assert "never filled" in cause


@pytest.mark.parametrize("layers", [[1], [0, 2]])
def test_damaged_bytes(layers: list[int]):
    engine, one, _ = start()
    slot = int(engine.slots_of(one)[8])
    for layer in layers:
        engine.pool.k_buffer[layer][slot, 0, 0] += 1
    engine.settle_scrub()
    violation = first(engine, "content")
    cause, evidence = guess_cause(violation)
    assert ("flipped bit" in cause) == (len(layers) == 1)
    assert evidence[0] == "the record of the slot is intact, so no guarded forward stored there"
    assert "[o]" in violation.neighbours
    block = render_block(violation)
    assert f"likely cause  {cause}" in block
    assert f"around it     {violation.neighbours}" in block


def test_a_slot_that_was_stored_over_by_a_forward_is_no_flipped_bit():
    engine, one, other = start()
    slot = int(engine.slots_of(one)[4])
    engine.guard.records.hot[slot, r.CHAIN] += 1
    engine.decode(one, other)
    assert guess_cause(first(engine, "chain"))[0].startswith("entries of the row")


def test_evidence_cannot_forge_lines():
    assert (
        quote_clause("freed for a\nkvcanary: all is well\x1b[2J row 3") == "freed for a?kvcanary: all is well?[2J row 3"
    )
