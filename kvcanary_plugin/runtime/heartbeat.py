"""A sign of life from the scheduler's thread: what was done since the start, and how far back the passes reach.

It goes on after the guard is gone, and says so: what cannot be told from silence is not health.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..report.metrics import Metrics
from ..tiers.outcomes import total_pages
from .figures import Figures, Vitals

if TYPE_CHECKING:
    from .guard import Guard
    from .session import Session

logger = logging.getLogger("kvcanary")

PERIOD_SECONDS = 30.0
METRICS_PERIOD_SECONDS = 5.0


class Heartbeat:
    """Writes ``heartbeat`` events, and keeps the metrics up to date if they are exported.

    Attributes:
        serving_seconds, idle_seconds: spent in calls of ours, counted by the session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._metrics: Metrics | None = None
        self._figures = Figures()
        self._checks: tuple[str, ...] = ()
        self._storage: list[Callable[[], dict[str, dict[str, int]]]] = []
        self._event_due = time.monotonic() + PERIOD_SECONDS
        self._due = self._event_due
        self._is_failing = False
        self.serving_seconds = 0.0
        self.idle_seconds = 0.0

    def export(self, rank: int) -> None:
        """From now on there are metrics: SGLang was started with ``--enable-metrics``. Never raises."""
        if self._metrics is not None:
            return
        try:
            guard = self._session.guard
            self._metrics = Metrics(rank) if guard is None else describe_guard(guard, rank)
        except Exception:
            logger.exception("kvcanary: no metrics are exported; the guard goes on")
            return
        self._session.reporter.metrics = self._metrics
        self._due = time.monotonic()
        self.beat()

    def watch_storage(self, status: Callable[[], dict[str, dict[str, int]]]) -> None:
        """A storage backend was opened; ``status`` gives its pages by pool and outcome, from any thread."""
        self._storage.append(status)

    def note(self) -> None:
        """Remember the figures of the guard, which is about to go."""
        guard = self._session.guard
        if guard is not None:
            self._contain(lambda: self._look_at(guard))
        self._due = self._event_due = 0.0

    def beat(self) -> None:
        """Tell how things stand, if it is time. Called for every result and every idle moment; never raises."""
        if time.monotonic() >= self._due:
            self._contain(self._tell)

    def look(self) -> Vitals:
        """How things stand."""
        session = self._session
        if session.guard is not None:
            self._look_at(session.guard)
        return Vitals(
            state=session.state,
            mode=session.mode,
            checks=self._checks,
            figures=self._figures,
            serving_seconds=self.serving_seconds,
            idle_seconds=self.idle_seconds,
            quarantine={} if session.policy is None else session.policy.totals,
            has_host=session.guard is not None and session.guard.traffic.transfers is not None,
            pages=total_pages(status() for status in self._storage),
        )

    def _look_at(self, guard: Guard) -> None:
        self._figures, self._checks = guard.figures, guard.checks

    def _tell(self) -> None:
        now = time.monotonic()
        is_event_due = now >= self._event_due
        if is_event_due:
            self._event_due = now + PERIOD_SECONDS
        self._due = min(self._event_due, now + METRICS_PERIOD_SECONDS) if self._metrics else self._event_due
        vitals = self.look()
        if self._metrics is not None:
            self._metrics.show(vitals)
        if is_event_due:
            reporter = self._session.reporter
            reporter.event("heartbeat", {**vitals.to_dict(), "violations": dict(reporter.counts)})

    def _contain(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception:  # the guard does its work without being able to tell of it
            if not self._is_failing:
                logger.exception("kvcanary: the heartbeat failed; this is said once")
            self._is_failing = True


def describe_guard(guard: Guard, rank: int) -> Metrics:
    """The metrics of a process that has ``guard``."""
    return Metrics(
        rank,
        guard.pool.name,
        slots={space.title: space.slots.slot_count for space in guard.spaces},
        states=[f"{guard.pool.name}/{watch.state.name}" for watch in guard.states],
        resident_bytes=guard.resident_bytes,
    )
