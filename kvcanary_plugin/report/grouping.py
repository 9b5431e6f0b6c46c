"""Reports of the same damage become one finding.

The same are: for slots, reports of one check and kind in one place (pool, layer, half) that concern the same reader,
owner and writer; without a reader also of one process. A row that names thirty wrong slots is one finding, on however
many ranks. For pages, reports of one check and kind on one way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..runtime.violation import Violation
from ..tiers.finding import TierViolation
from .drill import Drill
from .events import Found, Origin
from .outcome import tell_actions, tell_bytes
from .server import ServerFacts
from .summary import Finding

MAX_GROUPS = 10_000
MAX_PLACES = 1000


class _Group:
    def __init__(self, found: Found, drill: Drill | None, server: ServerFacts, time: float) -> None:
        self.found, self.drill, self.server = found, drill, server
        self.mode, self.checks = server.mode, server.checks
        self.first_time = self.last_time = time
        self.count = self.unkept = 0
        self.slots: set[int] = set()
        self.pages: dict[str, str] = {}
        self.ranks: set[int] = set()
        self.pids: set[int] = set()

    def add(self, origin: Origin, violation: Violation | TierViolation) -> None:
        self.count += 1
        self.first_time, self.last_time = min(self.first_time, origin.time), max(self.last_time, origin.time)
        if len(self.ranks) < MAX_PLACES:
            self.ranks.add(violation.rank)
        if len(self.pids) < MAX_PLACES:
            self.pids.add(origin.pid)
        if isinstance(violation, TierViolation):
            if len(self.pages) < MAX_PLACES:
                self.pages.setdefault(violation.page_key, violation.place)
            else:
                self.unkept += violation.page_key not in self.pages
        elif len(self.slots) < MAX_PLACES:
            self.slots.add(violation.slot)
        else:
            self.unkept += violation.slot not in self.slots

    def freeze(self, has_tier_findings: bool) -> Finding:
        violation, slots = self.found.violation, sorted(self.slots)
        return Finding(
            found=self.found,
            count=self.count,
            first_time=self.first_time,
            last_time=self.last_time,
            slots=tuple(slots),
            slot_count=len(slots) + (self.unkept if slots else 0),
            page_keys=tuple(self.pages.items()),
            page_count=len(self.pages) + (self.unkept if self.pages else 0),
            ranks=tuple(sorted(self.ranks)),
            pids=tuple(sorted(self.pids)),
            drill=self.drill,
            actions=tell_actions(violation, slots, self.mode, self.server),
            bytes_elsewhere=tell_bytes(
                violation, slots, self.last_time, self.checks, self.server, has_tier_findings=has_tier_findings
            ),
        )


class Groups:
    """The findings so far.

    Attributes:
        kept_out: reports of damage that is unlike any other, beyond what is kept.
    """

    def __init__(self) -> None:
        self.kept_out = 0
        self._groups: dict[tuple[Any, ...], _Group] = {}
        self._has_tier_findings = False

    def add(self, origin: Origin, found: Found, drill: Drill | None, server: ServerFacts) -> None:
        """Take in one report that ``server`` wrote."""
        violation = found.violation
        self._has_tier_findings |= isinstance(violation, TierViolation)
        key = (drill, *_key(found, server))
        group = self._groups.get(key)
        if group is None:
            if len(self._groups) >= MAX_GROUPS:
                self.kept_out += 1
                return
            group = self._groups[key] = _Group(found, drill, server, origin.time)
        group.add(origin, violation)

    def freeze(self) -> Iterator[Finding]:
        """Every finding: real ones first, then drills, each in order of time."""
        groups = sorted(self._groups.values(), key=lambda group: (group.drill is not None, group.first_time))
        return (group.freeze(self._has_tier_findings) for group in groups)


def _key(found: Found, server: ServerFacts) -> tuple[Any, ...]:
    violation = found.violation
    if isinstance(violation, TierViolation):
        return (violation.tier, found.check, violation.kind, violation.pool, violation.hop, id(server))
    writer = violation.writer
    return (
        "device",
        found.check,
        violation.kind,
        violation.pool,
        violation.layer,
        violation.half,
        violation.request,
        violation.owner,
        violation.differs,
        writer.request if writer else None,
        None if violation.request else id(server),
    )
