"""The report as text: what a person reads, word for word."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvcanary_plugin.report.collector import summarise
from kvcanary_plugin.report.strip import draw_strip
from kvcanary_plugin.report.terminal import render_text
from kvcanary_plugin.report.text import render_block
from kvcanary_plugin.runtime.violation import EXPLANATIONS
from kvcanary_plugin.tiers import finding as tier
from tests.report.incident import ALIAS, FLIP, PAGE, attached, event, heartbeat, injected, violation, write_log

BLOCK = """\
==============================================================================
KVCANARY: content in layer 2 V slot 5635 (pool "rows", rank 0)
  the bytes of the slot are not the ones that were written
  found by      the rotating pass after step 700, position 3
  expected      digest 0000000000000006
  found         digest 0000000000000005
  last written  by request abc row 103 in step 495
  likely cause  a flipped bit, or a stray write into one part of one layer
                - the record of the slot is intact, so no guarded forward stored there
                - only V of layer 2 differs
  around it     oooooooo[o]oo.cccc.
                         ^ slot 5635, of 5627..5643
                . free  o owned  c cached
SUMMARY: kvcanary: content rows slot=5635 layer=2 half=V position=3
=============================================================================="""

REPORT = """\
kvcanary report: DAMAGE: 2 findings in 3 reports; GUARD LOST in 1 process; 1 report of faults injected on purpose
  {path}: 8 events, 2026-01-02 03:00:00 to 2026-01-02 03:01:30 UTC
    line 9 incomplete and left out; the last line: a crash, or a server that writes just now

  by check      chain 2, content 2
  by kind       chain/position 2, content 2
  by tier       L1 device 4
  by pool       rows 4
  by rank       0 4
  injected      flip_cached 1  (drills: faults put in on purpose)
  events        violation 4, attached 1, detached 1, heartbeat 1, injected 1

process 100 (rank 0) of {path}
  from, to      2026-01-02 03:00:00 to 2026-01-02 03:01:30 UTC
  guarding      pool "rows": 8193 slots of 1024 bytes, checks chain+content+presence+ownership+identity, mode log
  heartbeat     last at 2026-01-02 03:01:00 UTC, 30 s before the log ends, state guarding
  looked at     1200 forwards: 540,000 slots verified, 9,600 stored, 48,000 gone over
  oldest slot   last looked at 5 s before that; passes done: 6; one takes about 10 s
  DETACHED      at 2026-01-02 03:01:30 UTC: GuardError: lost

==============================================================================
KVCANARY: content in layer 2 V slot 5635 (pool "rows", rank 0)
  the bytes of the slot are not the ones that were written
  found by      the rotating pass after step 700, position 3
  expected      digest 0000000000000006
  found         digest 0000000000000005
  last written  by request abc row 103 in step 495
  likely cause  a flipped bit, or a stray write into one part of one layer
                - the record of the slot is intact, so no guarded forward stored there
                - only V of layer 2 differs
  around it     oooooooo[o]oo.cccc.
                         ^ slot 5635, of 5627..5643
                . free  o owned  c cached
  tier          L1 device
  last good     on the device, as stored by request abc row 103 in step 495: its digest was taken right behind that
  done          nothing: mode log reports and serves on
  seen          at 2026-01-02 03:00:10 UTC, rank 0, process 100
SUMMARY: kvcanary: content rows slot=5635 layer=2 half=V position=3
==============================================================================

==============================================================================
KVCANARY: chain/position in slot 920 (pool "rows", rank 0)
  the slot holds a token of another position
  read by       request req-7 row 4 in step 800, position 11
  expected      token 9 position 11 chain 0000000000000002
  found         token 8 position 40 chain 0000000000000001
  last written  by request req-3 row 2 in step 640
  likely cause  the slot went to another request, or the row was filled from another's
                - it holds position 40 of another request, stored in step 640
  tier          L1 device
  bytes         clean on every hop: the pass has gone over the whole pool since, and no page of a storage tier \
failed either
  done          nothing: mode log reports and serves on
  seen          2 reports from 2026-01-02 03:00:11 to 2026-01-02 03:00:12 UTC, rank 0, process 100
                in 2 slots: 920..921
SUMMARY: kvcanary: chain/position rows slot=920 position=11
==============================================================================
1 more finding: --top 0 shows all, --json lists them

SUMMARY: kvcanary report: findings=3 reports=4 drills=1 hidden=0 alarms=1 damage=yes
"""


def test_a_block_shows_kind_and_place_first_and_a_line_for_grep_last():
    assert render_block(FLIP) == BLOCK


def test_the_whole_report(tmp_path: Path):
    events = [
        attached(),
        injected(5, 564, 700),
        violation(FLIP, 6, slot=564),
        violation(FLIP, 10),
        violation(ALIAS, 11),
    ]
    events += [violation(ALIAS, 12, slot=921), heartbeat(60), event("detached", 90, why="GuardError: lost")]
    path = write_log(tmp_path / "events.jsonl", events)
    with path.open("a") as file:
        file.write('{"schema":1,"event":"viol')
    shown = "".join(f"{piece}\n" for piece in render_text(summarise([path]), top=2))
    assert shown == REPORT.format(path=path)


def test_a_page_of_the_storage_tier():
    assert render_block(PAGE).split("\n") == [
        "=" * 78,
        'KVCANARY: content/digest on storage -> host of page 3a1f0c (pool "kv", rank 0)',
        "  other bytes came back than were stored",
        "  page          3a1f0c",
        "  kept in       /mnt/kv/pages.kvp slot 88 generation 2",
        "  went wrong    storage -> host",
        "  last good     in host memory, when it was stored",
        "SUMMARY: kvcanary: content/digest kv tier=storage page=3a1f0c",
        "=" * 78,
    ]


@pytest.mark.parametrize("kind", EXPLANATIONS)
def test_every_kind_is_told(tmp_path: Path, kind: str):
    path = write_log(
        tmp_path / "events.jsonl", [attached(), violation(ALIAS, 1, kind=kind), violation(FLIP, 2, kind=kind)]
    )
    shown = "\n".join(render_text(summarise([path]), top=0))
    assert shown.count(EXPLANATIONS[kind]) >= 2
    assert "not known" not in shown


@pytest.mark.parametrize("kind", tier.EXPLANATIONS)
def test_every_kind_of_the_storage_tier_is_told(tmp_path: Path, kind: str):
    path = write_log(tmp_path / "events.jsonl", [violation(PAGE, 1, kind=kind)])
    shown = "\n".join(render_text(summarise([path]), top=0))
    assert f"KVCANARY: {tier.CHECK_OF_KIND[kind]}/{kind} on storage -> host of page 3a1f0c" in shown
    assert tier.EXPLANATIONS[kind] in shown


@pytest.mark.parametrize("top", [0, 1, 2, 3, 5])
def test_only_the_first_findings_are_told_in_full(tmp_path: Path, top: int):
    path = write_log(tmp_path / "events.jsonl", [violation(FLIP, layer, layer=layer) for layer in range(3)])
    shown = "\n".join(render_text(summarise([path]), top))
    assert shown.count("KVCANARY:") == (min(top, 3) or 3)
    assert ("--top 0 shows all" in shown) == (0 < top < 3)


def test_a_finding_is_told_with_the_cause_that_the_log_gives(tmp_path: Path):
    told = violation(ALIAS, 1) | {"cause": "a cosmic ray", "evidence": ["it was night"]}
    shown = "\n".join(render_text(summarise([write_log(tmp_path / "events.jsonl", [told])]), 0))
    assert "likely cause  a cosmic ray\n                - it was night\n" in shown
    assert shown.count("                - ") == 1


def test_who_owned_the_slot():
    owned = dataclasses.replace(
        ALIAS, check="ownership", kind="foreign_slot", state="owned", owner="req-3", owner_row=2, owner_since=630
    )
    shown = render_block(owned)
    assert "  found         a slot that is owned, of request req-3 row 2\n" in shown
    assert "  held by       request req-3, on row 2 since step 630\n" in shown


@pytest.mark.parametrize(
    ("neighbours", "slot", "lines"),
    [
        ("[.]oo", 0, ("[.]oo", "  ^ slot 0, of 0..2", ". free  o owned")),
        ("qi[c]", 9, ("qi[c]", "    ^ slot 9, of 7..9", "c cached  q quarantined  i in a transfer")),
        ("oo", 9, ("oo", "o owned")),
    ],
)
def test_the_caret_stands_below_the_slot(neighbours: str, slot: int, lines: tuple[str, ...]):
    drawn = draw_strip(neighbours, slot)
    assert drawn == tuple(line.replace("  ^", " ^", 1) for line in lines)
    if "[" in neighbours:
        assert drawn[0][drawn[1].index("^")] == neighbours[neighbours.index("[") + 1]
