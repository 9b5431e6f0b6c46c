"""Takes violations in, reports each piece of damage once, counts the rest."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from ..runtime.violation import Violation
from .jsonl import EventLog
from .text import render_line

if TYPE_CHECKING:
    from .metrics import Metrics

logger = logging.getLogger("kvcanary")

MAX_REMEMBERED = 65536
MAX_REPORTED_A_STEP = 32
DEVICE = "device"
UNLISTED = "unlisted"


class Reporter:
    """One per process.

    Attributes:
        first: the first violation ever reported, None before that.
        counts: violations by check, repeats included.
        is_quiet: violations are counted and not listed, because there are too many.
        metrics: told of every violation at once; None where metrics are not exported.
    """

    def __init__(self, event_log: EventLog | None = None) -> None:
        self.first: Violation | None = None
        self.counts: Counter[str] = Counter()
        self.is_quiet = False
        self.metrics: Metrics | None = None
        self._counting = threading.Lock()  # the storage tier counts from I/O threads
        self._log = event_log
        self._seen: Counter[tuple[Any, ...]] = Counter()

    def report(self, violations: list[Violation]) -> list[Violation]:
        """Log what was not reported before. Returns the new ones."""
        fresh, repeated = [], []
        for violation in violations:
            self.count(violation.check, violation.tier, violation.pool)
            seen = self._seen[violation.key] = self._seen[violation.key] + 1
            if seen == 1:
                fresh.append(violation)
            elif seen in (10, 100, 1000, 10000) and not self.is_quiet:
                repeated.append((seen, violation))
        for violation in [] if self.is_quiet else fresh[:MAX_REPORTED_A_STEP]:
            logger.error("%s", render_line(violation))
            self.event("violation", violation.to_dict())
        if len(fresh) > MAX_REPORTED_A_STEP and not self.is_quiet:
            hidden = len(fresh) - MAX_REPORTED_A_STEP
            logger.error("kvcanary: and %d more damaged slots in step %d", hidden, fresh[0].step)
            self.event("more", {"step": fresh[0].step, "hidden": hidden})
        for seen, violation in repeated:
            logger.error("kvcanary: seen %d times: %s", seen, render_line(violation))
        if fresh and self.first is None:
            self.first = fresh[0]
        if len(self._seen) > MAX_REMEMBERED:  # an endless burst must not eat the host's memory
            self._seen.clear()
        return fresh

    def count(self, check: str, tier: str, pool: str, number: int = 1) -> None:
        """Count violations, repeats included. May be called from any thread."""
        with self._counting:
            self.counts[check] += number
            if self.metrics is not None:
                self.metrics.count_violations(check, tier, pool, number)

    def count_unlisted(self, count: int, step: int) -> None:
        """Violations the device counted but had no room to describe."""
        self.count(UNLISTED, DEVICE, "", count)  # of whichever pool
        if self.is_quiet:
            return
        logger.error("kvcanary: step %d had %d more violations than the device buffer describes", step, count)
        self.event("more", {"step": step, "hidden": count})

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """Write one line to the event log, if there is one."""
        if self._log is None:
            return
        try:
            self._log.write(name, fields)
        except OSError as error:  # a full disk must neither stop the server nor the guard
            logger.error(
                "kvcanary: cannot write to %s any more (%s); events go to this log only", self._log.path, error
            )
            self._log = None

    def close(self) -> None:
        """Flush the event log."""
        if self._log is not None:
            self._log.close()
            self._log = None
