"""A sign of life every half minute: what was done since the start, and how far back the rotating pass reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..report.reporter import Reporter

PERIOD_SECONDS = 30.0


class Heartbeat:
    """Writes a ``heartbeat`` event where enough time has passed since the last one.

    Attributes:
        verified: slot entries whose records were checked because a forward was about to read them.
        stored: slots that forwards stored and whose records were made.
        folded: slots that the rotating pass went over, idle moments included.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._due = time.monotonic() + PERIOD_SECONDS
        self.verified = 0
        self.stored = 0
        self.folded = 0

    def beat(self, describe: Callable[[], dict[str, Any]]) -> None:
        """Write an event if one is due; ``describe`` gives what else is to be said."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + PERIOD_SECONDS
        counts = {"verified": self.verified, "stored": self.stored, "folded": self.folded}
        self._reporter.event("heartbeat", {**counts, **describe(), "violations": dict(self._reporter.counts)})
