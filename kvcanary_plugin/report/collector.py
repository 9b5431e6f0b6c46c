"""From event logs to a :class:`~.summary.Summary`: line by line, in order of time, in memory for what is distinct."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..runtime.violation import Violation
from ..tiers.finding import TierViolation
from .bins import Bins
from .drill import Drill
from .events import KINDS, UNREAD, Attached, Found, Injected, More, Origin, read_event
from .grouping import Groups
from .jsonl import Line, LogReader
from .lanes import EVENT_LANES, PLACES_A_SECOND, lane_of
from .layout import name_tier
from .server import ServerFacts
from .summary import WHOLE_SLOT, DrillCount, LogFile, PoolMap, Summary

MAX_NAMES = 200  # of whatever a log makes up: names of events, kinds, pools
MAX_SERVERS = 4096
MAX_LAYERS = 1024
OTHERS = "(others)"


def summarise(paths: Sequence[str | Path]) -> Summary:
    """Read the logs at ``paths``, each file once however often it is named.

    Raises:
        LogError: a file cannot be opened, or a line is not an event.
    """
    readers: dict[tuple[int, int], _FileFacts] = {}
    repeated = []
    for path in paths:
        reader = LogReader(path)
        if reader.identity in readers:
            reader.close()
            repeated.append(str(path))
        else:
            readers[reader.identity] = _FileFacts(reader)
    collector = _Collector()
    for _, _, file, line, origin, said in heapq.merge(
        *(file.events(index) for index, file in enumerate(readers.values()))
    ):
        collector.take(file, line, origin, said)
    return collector.freeze([*readers.values()], repeated)


class _FileFacts:
    def __init__(self, reader: LogReader) -> None:
        self.path = str(reader.path)
        self.first_time: float | None = None
        self.last_time: float | None = None
        self._reader = reader
        self._count = 0

    def events(self, index: int) -> Iterator[tuple[Any, ...]]:
        """Begins with what the events of several files are put in order by."""
        for line in self._reader:
            origin, said = read_event(line)
            self._count += 1
            self.first_time = origin.time if self.first_time is None else min(self.first_time, origin.time)
            self.last_time = origin.time if self.last_time is None else max(self.last_time, origin.time)
            yield origin.time, (index, self._count), self, line, origin, said

    def freeze(self) -> LogFile:
        cut = tuple(self._reader.cut_lines)
        is_cut_at_end = bool(cut) and cut[-1] == self._reader.line_count
        return LogFile(self.path, self._count, cut, is_cut_at_end, self.first_time, self.last_time)


class _Collector:
    def __init__(self) -> None:
        self._events: Counter[str] = Counter()
        self._unknown: Counter[str] = Counter()
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in ("check", "kind", "tier", "pool", "rank")}
        self._servers: dict[tuple[str, int], ServerFacts] = {}
        self._closed: list[ServerFacts] = []
        self._groups = Groups()
        self._injected: dict[str, DrillCount] = {}
        self._timeline: Bins[tuple[str, bool]] = Bins()
        self._maps: dict[tuple[str, int], Bins[tuple[int, bool]]] = {}
        self._outside: Counter[tuple[str, int]] = Counter()
        self._slots: dict[tuple[str, int], int] = {}
        self._layers: dict[tuple[str, int], int] = {}
        self._violations = self._drilled = self._hidden = 0

    def take(self, file: _FileFacts, line: Line, origin: Origin, said: Any) -> None:
        """One event, in order of time."""
        _count(self._events, origin.event)
        if origin.event != "violation" and origin.event not in KINDS and origin.event not in UNREAD:
            _count(self._unknown, origin.event)
        server = self._server_of(file, line, origin, said)
        server.note(origin, said)
        if isinstance(said, Found):
            self._take_violation(origin, said, server)
        elif origin.event in EVENT_LANES:
            self._timeline.add((EVENT_LANES[origin.event], False), int(origin.time * PLACES_A_SECOND))
        if isinstance(said, More):
            self._hidden += said.hidden
        elif isinstance(said, Attached) and len(self._slots) < MAX_NAMES:
            self._slots[said.pool, said.rank] = said.slots
            self._layers[said.pool, said.rank] = said.layers
        elif isinstance(said, Injected):
            self._count_drill(said.fault, origin.time)

    def freeze(self, files: Sequence[_FileFacts], repeated: Sequence[str]) -> Summary:
        """Everything that was taken in."""
        logs = tuple(file.freeze() for file in files)
        ends = {log.path: log.last_time or 0.0 for log in logs}
        servers = sorted([*self._closed, *self._servers.values()], key=lambda server: server.first_time)
        return Summary(
            files=logs,
            repeated=tuple(repeated),
            first_time=min((log.first_time for log in logs if log.first_time is not None), default=None),
            last_time=max((log.last_time for log in logs if log.last_time is not None), default=None),
            events=_sorted(self._events),
            unknown=_sorted(self._unknown),
            counts={name: _sorted(counter) for name, counter in self._counts.items()},
            servers=tuple(server.freeze(ends[server.path]) for server in servers),
            findings=tuple(self._groups.freeze()),
            drills=tuple(self._injected.values()),
            violation_count=self._violations,
            drill_count=self._drilled,
            hidden_count=self._hidden,
            kept_out=self._groups.kept_out,
            timeline=self._timeline,
            maps=tuple(
                PoolMap(
                    pool,
                    rank,
                    self._slots.get((pool, rank)),
                    self._layers.get((pool, rank), 0),
                    bins,
                    self._outside[pool, rank],
                )
                for (pool, rank), bins in sorted(self._maps.items())
            ),
        )

    def _server_of(self, file: _FileFacts, line: Line, origin: Origin, said: Any) -> ServerFacts:
        key = file.path, origin.pid
        server = self._servers.get(key)
        if server is not None and isinstance(said, Attached) and server.is_restart(said):
            server.close(origin.time)
            self._closed.append(self._servers.pop(key))
            server = None
        if server is None:
            if len(self._servers) + len(self._closed) >= MAX_SERVERS:
                line.reject(f"is of one more process than the {MAX_SERVERS} that a report looks at")
            server = self._servers[key] = ServerFacts(file.path, origin.pid, origin.time)
        return server

    def _take_violation(self, origin: Origin, found: Found, server: ServerFacts) -> None:
        violation = found.violation
        is_page = isinstance(violation, TierViolation)
        drill = server.drills.find(violation)
        self._violations += 1
        self._drilled += drill is not None
        server.violation_count += 1
        named = {
            "check": found.check,
            "kind": violation.kind if violation.kind == found.check else f"{found.check}/{violation.kind}",
            "tier": name_tier(violation),
            "pool": violation.pool,
            "rank": str(violation.rank),
        }
        for name, value in named.items():
            _count(self._counts[name], value)
        lane = lane_of(found.check, is_page=is_page), drill is not None
        self._timeline.add(lane, int(origin.time * PLACES_A_SECOND))
        self._groups.add(origin, found, drill, server)
        if isinstance(violation, Violation):
            if found.check == "content":
                server.note_content(violation.pool, violation.slot)
            self._mark(violation, drill)

    def _mark(self, violation: Violation, drill: Drill | None) -> None:
        place = violation.pool, violation.rank
        if place not in self._maps and len(self._maps) >= MAX_NAMES:
            return
        bins = self._maps.setdefault(place, Bins())
        if 0 <= violation.slot < self._slots.get(place, 1 << 64):
            layer = WHOLE_SLOT if violation.layer is None or not 0 <= violation.layer < MAX_LAYERS else violation.layer
            bins.add((layer, drill is not None), violation.slot)
        else:
            self._outside[place] += 1

    def _count_drill(self, fault: str, time: float) -> None:
        fault = fault if fault in self._injected or len(self._injected) < MAX_NAMES else OTHERS
        known = self._injected.get(fault)
        if known is None:
            self._injected[fault] = DrillCount(fault, 1, time, time)
        else:
            first, last = min(known.first_time, time), max(known.last_time, time)
            self._injected[fault] = DrillCount(fault, known.count + 1, first, last)


def _count(counter: Counter[str], name: str) -> None:
    counter[name if name in counter or len(counter) < MAX_NAMES else OTHERS] += 1


def _sorted(counter: Counter[str]) -> dict[str, int]:
    return dict(sorted(counter.items(), key=lambda item: (-item[1], item[0])))
