"""Renderings and the event log."""

import dataclasses
import json

import pytest

from kvcanary_plugin.errors import ConfigError
from kvcanary_plugin.kernels.mixing import as_int64, locate_source
from kvcanary_plugin.report.jsonl import EventLog, read_events
from kvcanary_plugin.report.reporter import MAX_REPORTED_A_STEP, Reporter
from kvcanary_plugin.report.text import render_block, render_line
from kvcanary_plugin.runtime.violation import EXPLANATIONS, Violation, Writer

CHAIN = Violation(
    check="chain",
    kind="position",
    pool="mha",
    rank=1,
    step=42,
    phase="read",
    slot=67,
    page=4,
    position=5,
    request="abc",
    request_row=3,
    stored_token=11,
    expected_token=12,
    stored_position=9,
    stored_hash=2**64 - 1,
    expected_hash=1,
    writer=Writer(40, 2, "xyz"),
)
CONTENT = Violation(
    check="content",
    kind="content",
    pool="mha",
    rank=0,
    step=7,
    phase="scrub",
    slot=9,
    position=3,
    stored_token=1,
    stored_position=3,
    stored_hash=5,
    expected_hash=6,
    layer=17,
    half="V",
)


def test_line_begins_with_kind_and_place_and_names_all_parties():
    assert render_line(CHAIN) == (
        'kvcanary: chain/position in slot 67 page 4 (pool "mha", rank 1) position 5: '
        "expected token 12 position 5 chain 0000000000000001, found token 11 position 9 chain ffffffffffffffff; "
        "read by request abc row 3 in step 42; last written by request xyz row 2 in step 40"
    )
    assert render_line(CONTENT) == (
        'kvcanary: content in layer 17 V slot 9 (pool "mha", rank 0) position 3: '
        "expected digest 0000000000000006, found digest 0000000000000005; "
        "found by the rotating pass after step 7; last written by nobody"
    )


def test_block_ends_with_a_summary_for_grep():
    lines = render_block(CONTENT).splitlines()

    assert lines[1] == 'KVCANARY: content in layer 17 V slot 9 (pool "mha", rank 0)'
    assert lines[-2] == "SUMMARY: kvcanary: content mha slot=9 layer=17 half=V position=3"


@pytest.mark.parametrize("kind", EXPLANATIONS)
def test_every_kind_has_a_line_and_a_block(kind):
    checks = {"content": "content", "not_stored": "presence", "partly_stored": "presence"}
    differs = (("weights", "2", "1"),) if kind in ("other_identity", "mixed_weights") else ()
    violation = dataclasses.replace(CHAIN, kind=kind, check=checks.get(kind, "chain"), differs=differs)

    assert kind in render_line(violation)
    assert EXPLANATIONS[kind] in render_block(violation)


def test_what_a_client_put_into_a_request_id_cannot_forge_a_line():
    forged = dataclasses.replace(CHAIN, request="a\nkvcanary: all is well\x1b[2J; last written by request b")

    assert "\n" not in render_line(forged)
    assert '; last written by request b" row 3' in render_line(forged)  # within quotes
    assert "\x1b" not in render_line(forged) + render_block(forged)


def test_event_log_lines_are_json_with_hashes_as_text(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    Reporter(log).report([CHAIN])
    log.close()
    (event,) = read_events(tmp_path / "events.jsonl")

    assert event["event"] == "violation"
    assert (event["slot"], event["stored_hash"]) == (67, "f" * 16)
    assert event["writer"] == {"step": 40, "row": 2, "request": "xyz"}


def test_a_full_disk_costs_the_file_and_nothing_else(caplog):
    reporter = Reporter(EventLog("/dev/full"))

    assert reporter.report([CHAIN]) == [CHAIN]
    assert reporter.report([CONTENT]) == [CONTENT]
    assert caplog.text.count("events go to this log only") == 1


def test_a_restart_after_a_crash_leaves_the_file_readable(tmp_path):
    path = tmp_path / "events.jsonl"
    good = json.dumps({"schema": 1, "event": "attached"})
    path.write_text(f'{good}\n{{"schema": 1, "ev')
    log = EventLog(path)
    log.write("attached", {})
    log.close()

    assert [event["event"] for event in read_events(path)] == ["attached", "attached"]


def test_a_last_line_cut_short_is_no_error_any_other_is(tmp_path):
    path = tmp_path / "events.jsonl"
    good = json.dumps({"schema": 1, "event": "attached"})
    path.write_text(f'{good}\n{{"schema": 1, "ev')
    assert len(read_events(path)) == 1

    path.write_text(f"{good}\n{{nonsense}}\n{good}\n")
    with pytest.raises(ValueError, match=r"events\.jsonl:2 is not JSON"):
        read_events(path)
    path.write_text('{"foreign": true}\n')
    with pytest.raises(ValueError, match=r"events\.jsonl:1 is not an event of kvcanary schema 1"):
        read_events(path)


def test_a_log_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot append to --kvcanary-log"):
        EventLog(tmp_path / "missing" / "events.jsonl")


def test_one_report_for_the_same_damage_then_counts():
    reporter = Reporter()
    assert reporter.report([CHAIN]) == [CHAIN]
    assert reporter.report([dataclasses.replace(CHAIN, step=43)]) == []
    assert reporter.report([dataclasses.replace(CHAIN, writer=Writer(50, 2, "new"))]) != []
    assert reporter.counts == {"chain": 3}


def test_a_flood_in_one_step_is_cut_and_said_to_be(caplog):
    Reporter().report([dataclasses.replace(CHAIN, slot=slot) for slot in range(100)])

    assert len([record for record in caplog.records if "chain/position" in record.message]) == MAX_REPORTED_A_STEP
    assert "and 68 more damaged slots in step 42" in caplog.text


@pytest.mark.parametrize("source", [0, 1, 5, 63])
@pytest.mark.parametrize("change", [1, 2, 96, -7])
def test_the_one_damaged_source_is_located(source, change):
    digest, locator = 12345, -67890
    found = as_int64(digest + change), as_int64(locator + (2 * source + 1) * change)

    assert locate_source(digest, locator, *found, 64) == source


def test_damage_in_two_sources_is_not_pinned_on_one():
    assert locate_source(0, 0, 3 + 5, 3 * 1 + 5 * 7, 64) is None


def test_a_change_that_several_sources_explain_is_pinned_on_none():
    assert locate_source(0, 0, 2**62, as_int64(3 * 2**62), 64) is None  # b = 1, 3, 5, ... agree modulo 2^64
