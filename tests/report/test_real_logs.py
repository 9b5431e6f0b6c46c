"""Logs that a real guard wrote about real faults in a real pool, from the file to the report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvcanary_plugin.config import CHECKS
from kvcanary_plugin.report.collector import summarise
from kvcanary_plugin.report.jsonl import EventLog
from kvcanary_plugin.report.page import render_page
from kvcanary_plugin.report.terminal import render_text
from kvcanary_plugin.runtime.figures import Vitals
from tests.engine import Engine
from tests.unit.quarantined import QuarantinedEngine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.fixture
def log(path: Path) -> Iterator[EventLog]:
    log = EventLog(path)
    yield log
    log.close()


def start(log: EventLog, kind: type[Engine] = Engine, **options):
    engine = kind(checks=options.pop("checks", CHECKS), **options)
    engine.reporter.event = log.write  # to the file instead of a list
    one, other = engine.request(30), engine.request(25)
    engine.prefill(one, other)
    engine.run(one, other, steps=4)
    return engine, one, other


def exchange(engine, one, other):
    row = engine.rows.req_to_token[one.req_pool_idx]
    row[[3, 9]] = row[[9, 3]]
    engine.decode(one, other)


def take_foreign(engine, one, other):
    engine.rows.req_to_token[one.req_pool_idx, 5] = engine.slots_of(other)[6].int()
    engine.decode(one, other)


def fill_garbage(engine, one, other):
    engine.rows.req_to_token[one.req_pool_idx, 5] = 100_000
    engine.decode(one, other)


def free_in_use(engine, one, other):
    slots = engine.slots_of(one)[7:8]
    engine.guard.traffic.release(slots)
    engine.allocator.free(slots)
    engine.guard.ledger.note_free(slots)
    engine.decode(one, other)


def flip(engine, one, other):
    engine.pool.k_buffer[1][int(engine.slots_of(one)[8]), 0, 0] += 1
    engine.settle_scrub()


def overwrite(engine, one, other):
    slot = int(engine.slots_of(one)[8])
    for layer in (0, 2):
        engine.pool.v_buffer[layer][slot] += 1
    engine.settle_scrub()


def skip_store(engine, one, other):
    store = engine.store

    def without_last(slots: torch.Tensor) -> None:
        kept = engine.pool.v_buffer[2][slots].clone()
        store(slots)
        engine.pool.v_buffer[2][slots] = kept

    engine.store = without_last
    engine.decode(one, other)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (exchange, {"chain/position": "entries of the row were exchanged or shifted"}),
        (take_foreign, {"chain/position": "the slot went to another request"}),
        (fill_garbage, {"chain/slot_range": "the row was overwritten with garbage"}),
        (
            free_in_use,
            {"chain/dead_slot": "the slot was freed while its own", "ownership/free_in_use": "a release that counts"},
        ),
        (flip, {"content in layer 1 K": "a flipped bit"}),
        (overwrite, {"content in several layers": "the slot was overwritten in several layers"}),
        (skip_store, {"presence/not_stored": "a layer skipped its store"}),
    ],
)
def test_what_the_guard_wrote_is_told_with_its_cause(log: EventLog, path: Path, damage, told: dict[str, str]):
    engine, one, other = start(log)
    damage(engine, one, other)
    summary = summarise([path])
    assert summary.has_damage
    assert not summary.unknown
    shown = "\n".join(render_text(summary, 0))
    for title, cause in told.items():
        block = next(block for block in shown.split("KVCANARY: ") if block.startswith(title))
        assert f"likely cause  {cause}" in block
    clauses = [line for line in shown.split("\n") if line.startswith("                - ")]
    assert len(clauses) == len(set(clauses)) or len(summary.findings) > 1  # the same evidence is not told twice
    assert shown.count("^ slot ") == shown.count("around it")
    page = render_page(summary, top=0)
    assert page.count("<details") == len(summary.findings)
    assert all(title.split(" in ")[0] in page for title in told)


def test_the_clean_twin_has_no_damage(log: EventLog, path: Path):
    engine, one, other = start(log)
    engine.run(one, other, steps=4)
    engine.settle_scrub()
    vitals = Vitals("guarding", "log", tuple(engine.guard.checks), engine.guard.figures)
    log.write("heartbeat", {**vitals.to_dict(), "violations": dict(engine.reporter.counts)})
    summary = summarise([path])
    assert not summary.has_damage
    assert not summary.unknown
    assert "no damage recorded" in next(iter(render_text(summary, 0)))
    (server,) = summary.servers
    assert server.heartbeat is not None
    assert server.heartbeat.forwards == engine.guard.figures.forwards > 0


def test_what_mode_quarantine_did_is_told(log: EventLog, path: Path):
    engine = QuarantinedEngine(checks=("chain", "content"))
    engine.reporter.event = log.write
    log.write(
        "attached",
        {"pool": "rows", "rank": 0, "slots": 513, "bytes_per_slot": 1, "mode": "quarantine", "checks": ["content"]},
    )
    one, other = engine.request(30), engine.request(25)
    engine.start(one, other)
    engine.run(one, other, steps=4)
    slot = int(engine.slots_of(one)[32])
    engine.flip(slot)
    engine.settle_scrub()
    (finding,) = summarise([path]).findings
    assert finding.actions[0].startswith(f"slot {slot} out of circulation since ")
    assert json.loads(path.read_text().split("\n")[-2])["event"] == "quarantined"
