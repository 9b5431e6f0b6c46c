"""The events of a log, as far as the report reads them; see ``docs/events.md``. What a field is, its type says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..runtime.violation import Violation
from ..tiers.finding import TierViolation
from .decoding import DecodeError, decode_fields
from .jsonl import Line

LATEST_TIME = 253402300799.0  # the last second of the year 9999
HASHES = ("stored_hash", "expected_hash")


@dataclass(frozen=True, slots=True)
class Origin:
    """When and where an event was written: ``time`` in seconds since 1970."""

    event: str
    time: float
    pid: int


@dataclass(frozen=True, slots=True)
class Attached:
    """A guard was attached to a pool."""

    pool: str
    rank: int
    slots: int
    bytes_per_slot: int
    mode: str
    checks: tuple[str, ...]
    page_size: int = 1
    layers: int = 0


@dataclass(frozen=True, slots=True)
class Containment:
    """What mode ``quarantine`` did, and its totals: ``quarantined``, ``degraded``, ``recovered``; or totals alone."""

    state: str
    ended_total: int
    withheld_slots: int
    refused_slots: int
    tainted_points: int
    requests: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life."""

    forwards: int = 0
    verified: int = 0
    stored: int = 0
    folded: int = 0
    state: str | None = None
    mode: str | None = None
    passes: int | None = None
    period_forwards: int | None = None
    period_seconds: float | None = None
    oldest_unverified_seconds: float | None = None
    quarantine: Containment | None = None
    violations: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class More:
    """Violations that are counted but not described."""

    hidden: int
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Lifted:
    """A flush has brought withheld slots back."""

    slot_count: int


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights were updated in place."""

    version: str
    flushed: bool
    older_slots: int


@dataclass(frozen=True, slots=True)
class MixedWeights:
    """Requests run on through that update."""

    version: str
    requests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """The guard is gone, was never there, or has stopped the server: ``detached``, ``uncovered`` and ``stopped``."""

    why: str


@dataclass(frozen=True, slots=True)
class Changed:
    """Settings were changed while the server was running, or the guard goes on after a pause."""

    mode: str
    checks: tuple[str, ...] | None = None
    state: str = "guarding"
    scrub_budget: float | None = None
    audit: bool = False


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault was injected on purpose. ``slots`` is empty where a fault concerns all of ``requests``; where there are
    ``entries``, any of so many entries of a row, from ``positions`` on, may be named.
    """

    fault: str
    step: int
    check: str
    slots: tuple[int, ...]
    bound_forwards: int
    positions: tuple[int, ...] = ()
    layer: int | None = None
    half: str | None = None
    request: str | None = None
    other: str | None = None
    entries: int | None = None
    requests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """A violation with the cause that was guessed when it was found: None where the writer of the log gave none."""

    check: str
    violation: Violation | TierViolation
    cause: str | None = None
    evidence: tuple[str, ...] = ()


KINDS: dict[str, type] = {
    "attached": Attached,
    "heartbeat": Heartbeat,
    "more": More,
    "quarantined": Containment,
    "degraded": Containment,
    "recovered": Containment,
    "lifted": Lifted,
    "weights": Weights,
    "mixed_weights": MixedWeights,
    "detached": Ending,
    "uncovered": Ending,
    "stopped": Ending,
    "changed": Changed,
    "resumed": Changed,
    "released": Changed,
    "injected": Injected,
}
# Known, and nothing in them that the report needs.
UNREAD = ("learned",)


def read_event(line: Line) -> tuple[Origin, Any]:
    """When and where ``line`` was written, and what it says: None if the report does not read events of that name.

    Raises:
        LogError: a field is missing or has another type than ``docs/events.md`` says; names line and field.
    """
    try:
        origin = decode_fields(Origin, line.event)
        if not 0 <= origin.time <= LATEST_TIME:
            raise DecodeError("has a time that lies in no year from 1970 to 9999")
        if origin.event == "violation":
            return origin, read_violation(line.event)
        kind = KINDS.get(origin.event)
        return origin, None if kind is None else decode_fields(kind, line.event)
    except DecodeError as error:
        line.reject(f"(event {str(line.event['event'])[:40]!a}) {error}")


def read_violation(event: dict[str, Any]) -> Found:
    """A violation from the fields of its event.

    Raises:
        DecodeError: a field is missing or has another type.
    """
    said = decode_fields(_Said, event)
    if "page_key" in event:  # slots have a tier too
        return Found(said.check, decode_fields(TierViolation, event), said.cause, said.evidence)
    fields = dict(event)
    for name in HASHES:
        fields[name] = _read_hash(name, event.get(name))
    return Found(said.check, decode_fields(Violation, fields), said.cause, said.evidence)


@dataclass(frozen=True, slots=True)
class _Said:
    check: str
    cause: str | None = None
    evidence: tuple[str, ...] = ()


def _read_hash(name: str, value: Any) -> int | None:
    if value is None:
        return None
    try:
        number = int(value, 16) if isinstance(value, str) and 0 < len(value) <= 16 else -1
    except ValueError:
        number = -1
    if number < 0:
        raise DecodeError(f"has in field {name!r} not 16 hex digits")
    return number
