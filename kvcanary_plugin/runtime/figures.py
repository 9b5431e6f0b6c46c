"""What there is to tell of a process, read once for the ``heartbeat`` event and the metrics alike."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..tiers.outcomes import PageTotals
from .space import Space


@dataclass(frozen=True, slots=True)
class Sweep:
    """How far the passes over one numbering of slots have come, rotating and idle pass together.

    Attributes:
        pool: what reports call the numbering.
        folded, folded_bytes: slots gone over since the start, and their bytes; slots that hold nothing are skipped, but
            the host does not know which those are.
        oldest_monotonic: when the slot was gone over that has waited longest, by ``time.monotonic``.
    """

    pool: str
    folded: int
    folded_bytes: int
    passes: int
    period_forwards: int
    period_seconds: float | None
    oldest_monotonic: float

    @classmethod
    def of(cls, space: Space) -> Sweep | None:
        """Of the passes over ``space``; None if its bytes are not looked at."""
        scrubber = space.scrubber
        if scrubber is None:
            return None
        return cls(
            pool=space.title,
            folded=scrubber.folded,
            folded_bytes=scrubber.folded * space.slots.table.bytes_per_slot,
            passes=scrubber.passes,
            period_forwards=scrubber.period_forwards,
            period_seconds=scrubber.period_seconds,
            oldest_monotonic=time.monotonic() - scrubber.oldest_age_seconds(),
        )

    @property
    def oldest_unverified_seconds(self) -> float:
        """How long ago that is; it grows on when the guard is gone."""
        return time.monotonic() - self.oldest_monotonic


@dataclass(frozen=True, slots=True)
class Figures:
    """What a guard has done since it was attached.

    Attributes:
        verified: slot entries whose records were checked because a forward was about to read them.
        stored: slots that forwards stored and whose records were made.
        sweeps: of each numbering of slots whose bytes are looked at, the main one first.
    """

    forwards: int = 0
    verified: int = 0
    stored: int = 0
    sweeps: tuple[Sweep, ...] = ()

    @classmethod
    def of(cls, spaces: Sequence[Space], forwards: int, verified: int, stored: int) -> Figures:
        """Of a guard with ``spaces``, the main one first."""
        return cls(forwards, verified, stored, tuple(sweep for space in spaces if (sweep := Sweep.of(space))))

    def to_dict(self) -> dict[str, Any]:
        """Plain values; of the passes those of the first numbering, but all slots and bytes they went over."""
        fields: dict[str, Any] = {
            "forwards": self.forwards,
            "verified": self.verified,
            "stored": self.stored,
            "folded": sum(sweep.folded for sweep in self.sweeps),
            "folded_bytes": sum(sweep.folded_bytes for sweep in self.sweeps),
        }
        if self.sweeps:
            main = self.sweeps[0]
            fields |= {
                "passes": main.passes,
                "period_forwards": main.period_forwards,
                "period_seconds": main.period_seconds,
                "oldest_unverified_seconds": round(main.oldest_unverified_seconds, 3),
            }
        return fields


@dataclass(frozen=True, slots=True)
class Vitals:
    """How a process stands.

    Attributes:
        state: see :attr:`Session.state`.
        mode, checks: in force; the last ones after a detach.
        figures: of the guard; the last ones after a detach.
        serving_seconds, idle_seconds: spent in calls of ours on the scheduler's thread, while there was work for the
            server and while there was none.
        quarantine: see :attr:`Quarantine.totals`; empty in other modes.
        has_host: KV goes to host memory and back.
        pages: of the storage tier, by pool.
    """

    state: str
    mode: str
    checks: tuple[str, ...] = ()
    figures: Figures = field(default_factory=Figures)
    serving_seconds: float = 0.0
    idle_seconds: float = 0.0
    quarantine: Mapping[str, Any] = field(default_factory=dict)
    has_host: bool = False
    pages: Mapping[str, PageTotals] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Fields of the ``heartbeat`` event."""
        fields = {
            "state": self.state,
            "mode": self.mode,
            **self.figures.to_dict(),
            "serving_seconds": round(self.serving_seconds, 3),
            "idle_seconds": round(self.idle_seconds, 3),
        }
        if self.quarantine:
            fields["quarantine"] = dict(self.quarantine)
        if self.pages:
            fields["storage_pages"] = {pool: totals.to_dict() for pool, totals in self.pages.items()}
        return fields
