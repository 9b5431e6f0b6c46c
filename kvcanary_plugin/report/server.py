"""What one process of a server wrote to its log, collected event by event."""

from __future__ import annotations

from typing import Any

from ..runtime.heartbeat import PERIOD_SECONDS
from . import events as e
from .drill import Drills
from .summary import Ended, Server

GAP_SECONDS = 3 * PERIOD_SECONDS
MAX_GAPS = 64
MAX_ENDINGS = 16
MAX_CHANGES = 16
MAX_REMEMBERED = 65536


class ServerFacts:
    """One process, from one start to the next.

    Attributes:
        mode, checks: in force now.
        drills: the faults injected into it.
        damaged: pool and slot of each place in which ``content`` found damage.
        withheld: slots that were taken out of circulation, and when.
        ended: requests that mode ``quarantine`` ended, and when.
        clean_since: every slot was looked at since this time.
        stopped: when and why mode ``raise`` stopped the server.
    """

    def __init__(self, path: str, pid: int, time: float) -> None:
        self.path, self.pid = path, pid
        self.first_time = self.last_time = time
        self.mode: str | None = None
        self.checks: tuple[str, ...] = ()
        self.drills = Drills()
        self.damaged: set[tuple[str, int]] = set()
        self.withheld: dict[int, float] = {}
        self.ended: dict[str, float] = {}
        self.clean_since = 0.0
        self.stopped: Ended | None = None
        self.violation_count = 0
        self._end: float | None = None
        self._attached: list[e.Attached] = []
        self._heartbeat: tuple[float, e.Heartbeat] | None = None
        self._gaps: list[tuple[float, float]] = []
        self._containment: e.Containment | None = None
        self._lifted = self._hidden = self._mixed = self._updates = 0
        self._weights: e.Weights | None = None
        self._endings: list[Ended] = []
        self._changes: list[tuple[float, e.Changed]] = []
        self._change_count = 0

    def is_restart(self, attached: e.Attached) -> bool:
        """Whether another process begins with this: the pool is guarded already."""
        return any((known.pool, known.rank) == (attached.pool, attached.rank) for known in self._attached)

    def close(self, time: float) -> None:
        """Another process begins at ``time`` under the same number."""
        self._end = time

    def note(self, origin: e.Origin, said: Any) -> None:
        """Take in one event."""
        self.last_time = max(self.last_time, origin.time)
        if isinstance(said, e.Attached):
            self._attached.append(said)
            self.mode, self.checks = said.mode, said.checks
        elif isinstance(said, e.Changed):
            self._change_count += 1
            self._changes = [*self._changes, (origin.time, said)][-MAX_CHANGES:]
            self.mode = said.mode
            self.checks = self.checks if said.checks is None else said.checks
        elif isinstance(said, e.Heartbeat):
            self._note_heartbeat(origin.time, said)
        elif isinstance(said, e.Injected):
            self.drills.note(said)
        elif isinstance(said, e.More):
            self._hidden += said.hidden
        elif isinstance(said, e.Containment):
            self._note_containment(origin.time, said)
        elif isinstance(said, e.Lifted):
            self._lifted += said.slot_count
        elif isinstance(said, e.Weights):
            self._weights, self._updates = said, self._updates + 1
        elif isinstance(said, e.MixedWeights):
            self._mixed += len(said.requests)
        elif isinstance(said, e.Ending):
            self._note_ending(Ended(origin.event, origin.time, said.why))

    def note_content(self, pool: str, slot: int) -> None:
        """Check ``content`` found damage in ``slot``."""
        if len(self.damaged) < MAX_REMEMBERED:
            self.damaged.add((pool, slot))

    def has_gone_over(self, pool: str, time: float) -> bool:
        """Whether the rotating pass has looked at every slot of ``pool`` since ``time``, as far as the log says."""
        return self.clean_since >= time and any(known.pool == pool for known in self._attached)

    def freeze(self, log_end: float) -> Server:
        """What was collected."""
        time, heartbeat = self._heartbeat or (None, None)
        return Server(
            path=self.path,
            pid=self.pid,
            first_time=self.first_time,
            last_time=self.last_time,
            log_end=log_end if self._end is None else self._end,
            mode=self.mode,
            attached=tuple(self._attached),
            heartbeat=heartbeat,
            heartbeat_time=time,
            gaps=tuple(sorted(self._gaps)),
            containment=self._containment,
            lifted_slots=self._lifted,
            weights=self._weights,
            weights_count=self._updates,
            mixed_count=self._mixed,
            endings=tuple(self._endings),
            changes=tuple(self._changes),
            change_count=self._change_count,
            violation_count=self.violation_count,
            hidden_count=self._hidden,
        )

    def _note_heartbeat(self, time: float, heartbeat: e.Heartbeat) -> None:
        if self._heartbeat is not None and time - self._heartbeat[0] > GAP_SECONDS:
            self._gaps.append((self._heartbeat[0], time))
            self._gaps = sorted(self._gaps, key=lambda gap: gap[0] - gap[1])[:MAX_GAPS]
        self._heartbeat = time, heartbeat
        self.mode = heartbeat.mode or self.mode
        self._containment = heartbeat.quarantine or self._containment
        if heartbeat.oldest_unverified_seconds is not None and heartbeat.passes:
            self.clean_since = max(self.clean_since, time - heartbeat.oldest_unverified_seconds)

    def _note_containment(self, time: float, containment: e.Containment) -> None:
        self._containment = containment
        if len(self.withheld) + len(self.ended) < MAX_REMEMBERED:
            self.withheld.update((slot, time) for slot in containment.slots if slot not in self.withheld)
            self.ended.update((request, time) for request in containment.requests if request not in self.ended)

    def _note_ending(self, ended: Ended) -> None:
        if len(self._endings) < MAX_ENDINGS:
            self._endings.append(ended)
        if ended.event == "stopped" and self.stopped is None:
            self.stopped = ended
