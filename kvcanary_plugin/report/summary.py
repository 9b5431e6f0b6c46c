"""What a set of event logs says: one frozen record. Text, JSON and page are renderings of it.

Times are seconds since 1970; None means that there is none, or that the logs do not say. Texts are as they stand in the
logs, so whoever shows them has to make them harmless.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .bins import Bins
from .drill import Drill
from .events import Attached, Changed, Containment, Found, Heartbeat, Weights

WHOLE_SLOT = -1  # row of a map for damage that is not in one layer


@dataclass(frozen=True, slots=True)
class LogFile:
    """One file that was read.

    Attributes:
        cut_lines: numbers of lines that a crash cut short, or that are being written.
        is_cut_at_end: one of them is the last.
    """

    path: str
    event_count: int
    cut_lines: tuple[int, ...] = ()
    is_cut_at_end: bool = False
    first_time: float | None = None
    last_time: float | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The guard let go, was never there, or stopped the server (``event``), and why."""

    event: str
    time: float
    why: str


@dataclass(frozen=True, slots=True)
class Server:
    """One process, from one start to the next: in a container all of them may have the same ``pid``.

    Attributes:
        path: the log it wrote to.
        first_time, last_time: of its events.
        log_end: time of the last event of that log, of whichever process.
        mode: in force at the end; None if the log does not say.
        attached: the pools that are guarded.
        heartbeat, heartbeat_time: the last one.
        gaps: from the one heartbeat to the next where that took too long, the longest ones.
        containment: the last totals of mode ``quarantine``.
        weights: the last update.
        changes: of settings while it ran, and when; the last ones.
        mixed_count: requests that ran on through updates.
        endings: ``detached``, ``uncovered`` and ``stopped``.
        violation_count: reports of damage, one for each check and place.
        hidden_count: violations that were counted and not described.
    """

    path: str
    pid: int
    first_time: float
    last_time: float
    log_end: float
    mode: str | None = None
    attached: tuple[Attached, ...] = ()
    heartbeat: Heartbeat | None = None
    heartbeat_time: float | None = None
    gaps: tuple[tuple[float, float], ...] = ()
    containment: Containment | None = None
    lifted_slots: int = 0
    weights: Weights | None = None
    weights_count: int = 0
    changes: tuple[tuple[float, Changed], ...] = ()
    change_count: int = 0
    mixed_count: int = 0
    endings: tuple[Ended, ...] = ()
    violation_count: int = 0
    hidden_count: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose pools it guards."""
        return tuple(sorted({attached.rank for attached in self.attached}))

    @property
    def heartbeat_age(self) -> float | None:
        """Seconds from the last heartbeat to the end of the log."""
        return None if self.heartbeat_time is None else max(self.log_end - self.heartbeat_time, 0.0)


@dataclass(frozen=True, slots=True)
class Finding:
    """Reports of the same damage, told by the first of them.

    Attributes:
        found: the first report.
        count: how many there are.
        first_time, last_time: of the first and the last.
        slots: which they name, in order; ``slot_count`` says how many those are if not all are kept.
        page_keys: of the storage tier, in the same way, with the place of each.
        ranks, pids: where they come from.
        drill: the injected fault behind it.
        actions: what was done about it.
        bytes_elsewhere: what is known of the bytes, for a finding that is not about them; empty if nothing is.
    """

    found: Found
    count: int
    first_time: float
    last_time: float
    slots: tuple[int, ...]
    slot_count: int
    page_keys: tuple[tuple[str, str], ...]
    page_count: int
    ranks: tuple[int, ...]
    pids: tuple[int, ...]
    drill: Drill | None
    actions: tuple[str, ...]
    bytes_elsewhere: str


@dataclass(frozen=True, slots=True)
class DrillCount:
    """Faults injected under one name, and when."""

    fault: str
    count: int
    first_time: float
    last_time: float


@dataclass(frozen=True, slots=True)
class PoolMap:
    """Where in one pool of one rank damage lies: by slot, layer (or ``WHOLE_SLOT``), and whether it is a drill."""

    pool: str
    rank: int
    slots: int | None
    layers: int  # 0 where the log does not say
    damage: Bins[tuple[int, bool]]
    outside: int = 0  # damage that is in no slot of the pool


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything a report says.

    Attributes:
        files: in the order given, each once.
        repeated: names that were given for a file already named.
        events: how many there are of each name.
        unknown: the same of those that this version does not read.
        counts: reports of damage by ``check``, ``kind``, ``tier``, ``rank`` and ``pool``.
        findings: real ones first, then drills, each in order of time.
        violation_count, drill_count: reports of damage, and those of them that come from injected faults.
        hidden_count: violations that were counted and not described.
        kept_out: reports that belong to none of ``findings``, because there are too many kinds of them.
        timeline: events by hundredth of a second, and by lane and whether they come from a drill.
    """

    files: tuple[LogFile, ...]
    repeated: tuple[str, ...]
    first_time: float | None
    last_time: float | None
    events: Mapping[str, int]
    unknown: Mapping[str, int]
    counts: Mapping[str, Mapping[str, int]]
    servers: tuple[Server, ...]
    findings: tuple[Finding, ...]
    drills: tuple[DrillCount, ...]
    violation_count: int
    drill_count: int
    hidden_count: int
    kept_out: int
    timeline: Bins[tuple[str, bool]]
    maps: tuple[PoolMap, ...]

    @property
    def event_count(self) -> int:
        """Events of all files."""
        return sum(file.event_count for file in self.files)

    @property
    def has_damage(self) -> bool:
        """Damage is recorded: described, counted, or acted upon, also if a part of the log is missing."""
        counted = any(server.heartbeat and any(server.heartbeat.violations.values()) for server in self.servers)
        acted = any(self.events.get(name) for name in ("quarantined", "degraded", "stopped"))
        return bool(self.violation_count or self.hidden_count or counted or acted)

    @property
    def alarms(self) -> tuple[tuple[Server, Ended], ...]:
        """Processes that lost their guard."""
        return tuple(
            (server, ended) for server in self.servers for ended in server.endings if ended.event != "uncovered"
        )
