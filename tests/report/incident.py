"""Events by hand: single ones, and a night with two ranks, an overwrite, a bad disk and a drill."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvcanary_plugin.runtime.violation import Violation, Writer
from kvcanary_plugin.tiers.finding import TierViolation

START = 1_767_322_800.0  # 2026-01-02 03:00:00 UTC
CHECKS = ["chain", "content", "presence", "ownership", "identity"]

FLIP = Violation(
    check="content",
    kind="content",
    pool="rows",
    rank=0,
    step=700,
    phase="scrub",
    slot=5635,
    position=3,
    stored_token=17,
    stored_position=3,
    stored_hash=5,
    expected_hash=6,
    layer=2,
    half="V",
    writer=Writer(495, 103, "abc"),
    neighbours="oooooooo[o]oo.cccc.",
)
ALIAS = Violation(
    check="chain",
    kind="position",
    pool="rows",
    rank=0,
    step=800,
    phase="read",
    slot=920,
    position=11,
    request="req-7",
    request_row=4,
    stored_token=8,
    expected_token=9,
    stored_position=40,
    stored_hash=1,
    expected_hash=2,
    writer=Writer(640, 2, "req-3"),
)
PAGE = TierViolation("digest", "kv", 0, "3a1f0c", "/mnt/kv/pages.kvp slot 88 generation 2")


def event(name: str, at: float, pid: int = 100, **fields: Any) -> dict[str, Any]:
    """One event, ``at`` seconds behind the start."""
    return {"schema": 1, "event": name, "time": START + at, "pid": pid, **fields}


def violation(what: Violation | TierViolation, at: float, pid: int = 100, **changes: Any) -> dict[str, Any]:
    """The event of a violation, with some of its fields changed."""
    return event("violation", at, pid, **dataclasses.replace(what, **changes).to_dict())


def attached(
    at: float = 0.0, pid: int = 100, *, rank: int = 0, mode: str = "log", checks: Any = CHECKS
) -> dict[str, Any]:
    fields = {"pool": "rows", "rank": rank, "slots": 8193, "page_size": 1, "bytes_per_slot": 1024}
    return event("attached", at, pid, **fields, resident_bytes=1, checks=list(checks), mode=mode)


def heartbeat(at: float, pid: int = 100, *, oldest: float = 5.0, **counts: int) -> dict[str, Any]:
    return event(
        "heartbeat",
        at,
        pid,
        state="guarding",
        forwards=int(at * 20),
        verified=int(at * 9000),
        stored=int(at * 160),
        folded=int(at * 800),
        passes=int(at / 10),
        period_forwards=200,
        period_seconds=10.0,
        oldest_unverified_seconds=oldest,
        violations=counts,
    )


def injected(at: float, slot: int, step: int, pid: int = 100, **changes: Any) -> dict[str, Any]:
    fields = {"fault": "flip_cached", "step": step, "check": "content", "slots": [slot], "positions": [3]}
    return event("injected", at, pid, **{**fields, "bound_forwards": 200, "layer": 0, "half": "K", "bit": 9, **changes})


def quarantined(at: float, pid: int = 100, *, slots: Any = (), requests: Any = ()) -> dict[str, Any]:
    totals = {"state": "normal", "ended_total": len(requests), "withheld_slots": len(slots), "refused_slots": 0}
    return event("quarantined", at, pid, requests=list(requests), slots=list(slots), **totals, tainted_points=1)


def write_log(path: Path, events: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in events))
    return path


def night() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Half an hour of two ranks in mode ``quarantine``."""
    first = [attached(mode="quarantine"), *(heartbeat(30.0 * n) for n in range(1, 60) if not 31 <= n <= 36)]
    first += [
        injected(200, 564, 4000),
        violation(FLIP, 206, step=4090, slot=564, layer=0, half="K", neighbours="cccc[c]cccc"),
    ]
    first += [violation(FLIP, 640 + n, slot=5635 + 2 * n, layer=2 + n % 3) for n in range(12)]
    first += [quarantined(641, slots=[5635, 5637], requests=["req-1"])]
    first += [violation(ALIAS, 900 + n / 100, slot=920 + n, position=11 + n) for n in range(30)]
    first += [quarantined(901, slots=range(920, 950), requests=["req-7"])]
    first += [event("more", 902, step=801, hidden=44)]
    first += [
        violation(PAGE, 1200 + n, page_key=f"3a1f{n:02x}", place=f"/mnt/kv/pages.kvp slot {88 + n}") for n in range(9)
    ]
    first += [event("weights", 1300, version="v2#1", flushed=True, older_slots=0)]
    second = [attached(1, 101, rank=1, mode="quarantine"), *(heartbeat(30.0 * n, 101) for n in range(1, 41))]
    second += [violation(ALIAS, 900 + n / 100, 101, rank=1, slot=920 + n, position=11 + n) for n in range(30)]
    second += [quarantined(901, 101, slots=range(920, 950), requests=["req-7"])]
    second += [event("detached", 1210, 101, why="GuardError: more rows than the table has")]
    return sorted(first, key=_time), sorted(second, key=_time)


def _time(line: dict[str, Any]) -> float:
    return float(line["time"])
