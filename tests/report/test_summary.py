"""What a set of logs says: counts, servers, findings, drills, order, what was done."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcanary_plugin.report import grouping
from kvcanary_plugin.report.collector import summarise
from kvcanary_plugin.report.layout import lay_out
from tests.report.incident import (
    ALIAS,
    FLIP,
    PAGE,
    START,
    attached,
    event,
    heartbeat,
    injected,
    night,
    quarantined,
    violation,
    write_log,
)


@pytest.fixture
def read(tmp_path: Path):
    def read(*events, **options):
        return summarise([write_log(tmp_path / "events.jsonl", events)])

    return read


def test_a_clean_log_has_no_damage(read):
    summary = read(attached(), heartbeat(30), heartbeat(60))
    assert not summary.has_damage
    assert summary.findings == ()
    (server,) = summary.servers
    assert (server.mode, server.ranks, server.heartbeat_age) == ("log", (0,), 0.0)
    assert server.gaps == ()


def test_files_of_ranks_are_merged_in_order_of_time(tmp_path):
    first, second = night()
    summary = summarise([write_log(tmp_path / "0", first), write_log(tmp_path / "1", second)])
    assert [file.event_count for file in summary.files] == [len(first), len(second)]
    assert summary.counts["rank"] == {"0": 52, "1": 30}
    assert [server.pid for server in summary.servers] == [100, 101]
    real = [finding for finding in summary.findings if finding.drill is None]
    assert [finding.first_time for finding in real] == sorted(finding.first_time for finding in real)
    row = next(finding for finding in real if finding.found.check == "chain")
    assert (row.count, row.slot_count, row.ranks, row.pids) == (60, 30, (0, 1), (100, 101))
    assert summary.hidden_count == 44
    together = summarise([write_log(tmp_path / "both", [*first, *second])])
    assert together.findings == summary.findings
    assert together.counts == summary.counts


def test_the_same_file_counts_once(tmp_path):
    path = write_log(tmp_path / "a", [attached(), violation(FLIP, 5)])
    (tmp_path / "link").symlink_to(path)
    summary = summarise([path, path, tmp_path / "link"])
    assert summary.violation_count == 1
    assert summary.repeated == (str(path), str(tmp_path / "link"))


def test_same_damage_is_one_finding_and_other_damage_is_not(read):
    summary = read(
        violation(FLIP, 1), violation(FLIP, 2, slot=5636), violation(FLIP, 3, layer=3), violation(FLIP, 4, pid=7)
    )
    assert [(finding.count, finding.slots) for finding in summary.findings] == [
        (2, (5635, 5636)),
        (1, (5635,)),
        (1, (5635,)),
    ]
    assert (summary.findings[0].first_time, summary.findings[0].last_time) == (START + 1, START + 2)


def test_a_fault_found_in_time_is_a_drill_and_later_damage_of_that_slot_is_real(read):
    summary = read(
        attached(),
        injected(1, 564, 500),
        violation(FLIP, 2, slot=564, step=700),
        violation(FLIP, 3, slot=564, step=701),
        violation(FLIP, 4, slot=565, step=600),
        violation(FLIP, 5, slot=564, step=600, pid=7),
    )
    drills = {finding.first_time - START: finding.drill for finding in summary.findings}
    assert drills[2] is not None
    assert drills[2].fault == "flip_cached"
    assert [drills[at] for at in (3, 5)] == [None, None]
    assert (summary.violation_count, summary.drill_count) == (4, 1)
    assert summary.findings[-1].drill is not None  # real ones come first


def test_a_drill_in_a_row_takes_what_other_checks_say_of_it_along(read):
    fault = injected(
        1, 920, 800, fault="alias_row", check="chain", layer=None, half=None, request="req-7", bound_forwards=0
    )
    summary = read(
        fault,
        violation(ALIAS, 2),
        violation(ALIAS, 2, check="ownership", kind="foreign_slot", slot=950, state="owned"),
        violation(ALIAS, 3, step=802, slot=960, request="req-8"),
    )
    assert [finding.drill is not None for finding in summary.findings] == [False, True, True]


def test_a_restart_under_the_same_number_is_another_server(read):
    summary = read(attached(), heartbeat(30), attached(100), heartbeat(130), heartbeat(160))
    first, second = summary.servers
    assert (first.heartbeat_age, second.heartbeat_age) == (70.0, 0.0)
    assert first.gaps == second.gaps == ()


def test_a_heartbeat_tells_mode_and_totals_where_the_start_of_the_log_is_gone(read):
    totals = {"state": "degraded", "ended_total": 3, "withheld_slots": 70, "refused_slots": 0, "tainted_points": 2}
    (server,) = read(heartbeat(30) | {"mode": "quarantine", "quarantine": totals}).servers
    assert server.mode == "quarantine"
    assert server.containment is not None
    assert (server.containment.state, server.containment.withheld_slots) == ("degraded", 70)


def test_silence_is_seen_in_the_middle_and_at_the_end(read):
    summary = read(attached(), heartbeat(30), heartbeat(300), heartbeat(330, 101), heartbeat(900, 101))
    first, second = summary.servers
    assert first.gaps == ((START + 30, START + 300),)
    assert first.heartbeat_age == 600.0
    assert second.gaps == ((START + 330, START + 900),)


@pytest.mark.parametrize(
    ("mode", "then", "done"),
    [
        ("log", [], "nothing: mode log reports and serves on"),
        ("raise", [event("stopped", 6, why="x")], "the server stopped at 03:00:06 (mode raise)"),
        ("raise", [], "mode raise: the server was to stop, but the log has no event 'stopped'"),
        ("quarantine", [quarantined(6, slots=[920])], "slot 920 out of circulation since 03:00:06"),
        ("quarantine", [quarantined(6, requests=["req-7"])], "the request was ended with an error at 03:00:06"),
        ("quarantine", [quarantined(6, slots=[1])], "no event 'quarantined' names these slots or this request"),
    ],
)
def test_what_was_done(read, mode, then, done):
    (finding,) = read(attached(mode=mode), violation(ALIAS, 5), *then).findings
    assert len(finding.actions) == 1
    assert finding.actions[0].startswith(done)


def test_without_the_start_of_the_log_the_mode_is_not_known(read):
    (finding,) = read(violation(ALIAS, 5)).findings
    assert finding.actions[0].startswith("not known")
    assert finding.bytes_elsewhere.startswith("not looked at")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ([heartbeat(60, oldest=50.0)], "clean on every hop: the pass has gone over the whole pool since, and no page"),
        ([heartbeat(60, oldest=56.0)], "no damage reported in these slots so far; the pass has not gone over"),
        (
            [violation(FLIP, 20, slot=920), heartbeat(60, oldest=50.0)],
            "damaged as well: check content reported slot 920",
        ),
        (
            [violation(PAGE, 20), heartbeat(60, oldest=50.0)],
            "clean on the device: the pass has gone over the whole pool since",
        ),
    ],
)
def test_whether_the_bytes_behind_a_wrong_row_are_right(read, more, told):
    summary = read(attached(), violation(ALIAS, 5), *more)
    finding = next(finding for finding in summary.findings if finding.found.check == "chain")
    assert finding.bytes_elsewhere.startswith(told)


def test_bytes_of_a_slot_are_not_called_clean_where_content_is_off(read):
    (finding,) = read(attached(checks=["chain"]), violation(ALIAS, 5), heartbeat(60)).findings
    assert finding.bytes_elsewhere.startswith("not looked at: check content was not in force")


def test_tiers_and_the_last_good_hop(read):
    summary = read(attached(), violation(FLIP, 1), violation(PAGE, 2))
    slot, page = ({fact.label: fact.lines for fact in lay_out(finding).facts} for finding in summary.findings)
    assert slot["tier"] == ("L1 device",)
    assert slot["last good"][0].startswith("on the device, as stored by request abc row 103 in step 495")
    assert (page["tier"], page["went wrong"]) == (("L3 storage",), ("storage -> host",))
    assert page["last good"] == ("in host memory, when it was stored",)
    assert page["done"][0].startswith("counted as a miss")


def test_unknown_events_fields_kinds_and_phases_are_no_error(read):
    summary = read(
        event("from_the_future", 1, x=[1]),
        violation(FLIP, 2) | {"new_field": {"a": 1}},
        violation(ALIAS, 3) | {"kind": "melted", "check": "heat", "phase": "boil"},
        violation(PAGE, 4) | {"kind": "melted", "check": "heat", "tier": "L9"},
    )
    assert summary.unknown == {"from_the_future": 1}
    assert summary.counts["check"] == {"content": 1, "heat": 2}
    blocks = [lay_out(finding) for finding in summary.findings]
    assert [block.explanation for block in blocks[1:]] == ["a kind of damage that this version does not know"] * 2


def test_damage_is_recorded_even_if_the_reports_were_rotated_away(read):
    assert read(attached(), heartbeat(30, content=2)).has_damage
    assert read(event("more", 1, hidden=3, step=4)).has_damage
    assert read(event("stopped", 1, why="x")).has_damage
    assert not read(event("detached", 1, why="x")).has_damage


def test_what_is_unlike_any_other_is_counted_beyond_a_limit(read, monkeypatch):
    monkeypatch.setattr(grouping, "MAX_GROUPS", 3)
    summary = read(*(violation(FLIP, layer, layer=layer) for layer in range(10)), violation(FLIP, 11, layer=0))
    assert (len(summary.findings), summary.kept_out, summary.violation_count) == (3, 7, 11)
    assert summary.findings[0].count == 2


def test_many_slots_are_counted_and_the_first_kept(read, monkeypatch):
    monkeypatch.setattr(grouping, "MAX_PLACES", 5)
    (finding,) = read(*(violation(FLIP, n, slot=n) for n in range(9))).findings
    assert (finding.slots, finding.slot_count) == ((0, 1, 2, 3, 4), 9)


def test_slots_outside_the_pool_are_not_drawn_in_it(read):
    summary = read(attached(), violation(FLIP, 1, slot=9000), violation(FLIP, 2, slot=-1), violation(FLIP, 3))
    (pool_map,) = summary.maps
    assert (pool_map.outside, pool_map.damage.first, pool_map.slots) == (2, 5635, 8193)


def test_a_change_of_the_mode_is_followed(read):
    changed = event("changed", 5, mode="quarantine", checks=["chain"], audit=False, id=1, state="on", scrub_budget=0.1)
    summary = read(attached(), violation(FLIP, 1), changed, violation(ALIAS, 6), quarantined(7, slots=[920]))
    assert summary.servers[0].mode == "quarantine"
    assert [finding.actions[0][:7] for finding in summary.findings] == ["nothing", "slot 92"]
