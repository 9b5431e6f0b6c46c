"""A pass over the whole pool that somebody asked for: as fast as serving allows, with an end one can wait for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .scrubber import Scrubber


class Audit:
    """One pass over every slot space. It is over when the verdict of its last piece was read.

    Attributes:
        number: counts the audits of a server from 1.
    """

    def __init__(self, number: int, scrubbers: Sequence[Scrubber], violations: Mapping[str, int]) -> None:
        """``violations``: by check, as counted so far."""
        self.number = number
        self._scrubbers = scrubbers
        self._before = Counter(violations)
        self._found: dict[str, int] | None = None
        self._why: str | None = None
        self._last_step: int | None = None
        self._began_seconds = time.monotonic()
        self._seconds = 0.0
        self._slots = sum(scrubber.slot_count for scrubber in scrubbers)
        for scrubber in scrubbers:
            scrubber.hurry()

    @property
    def is_over(self) -> bool:
        """Whether every slot was looked at, and the verdict was read."""
        return self._found is not None

    def stop(self, why: str) -> None:
        """It will not come to its end, unless it has already."""
        if self._found is None and self._why is None:
            self._why = why
            self._seconds = time.monotonic() - self._began_seconds
            for scrubber in self._scrubbers:
                scrubber.relax()

    def note_enqueued(self, step: int) -> None:
        """Everything up to forward ``step`` is under way."""
        if self._last_step is None and not any(scrubber.is_hurried for scrubber in self._scrubbers):
            self._last_step = step

    def note_judged(self, step: int, violations: Mapping[str, int]) -> None:
        """The verdict of ``step`` was read; ``violations`` by check, as counted by now."""
        if self._found is None and self._why is None and self._last_step is not None and step >= self._last_step:
            self._found = dict(Counter(violations) - self._before)
            self._seconds = time.monotonic() - self._began_seconds

    def describe(self) -> dict[str, Any]:
        """``state`` (``running``, ``done`` or ``stopped``), ``why`` it was stopped, ``slots`` in all, ``seconds``, and
        ``violations`` found meanwhile by check.
        """
        is_stopped = self._why is not None
        seconds = self._seconds if self.is_over or is_stopped else time.monotonic() - self._began_seconds
        return {
            "number": self.number,
            "state": "done" if self.is_over else "stopped" if is_stopped else "running",
            "why": self._why or "",
            "slots": self._slots,
            "seconds": round(seconds, 3),
            "violations": self._found or {},
        }
