"""The Prometheus metrics of one process, on SGLang's own ``/metrics`` endpoint.

SGLang serves what all of its processes write to the folder in ``PROMETHEUS_MULTIPROC_DIR``. It sets that before it
starts them, and ``prometheus_client`` looks at it when it is imported. Hence the late import: nothing of it is loaded,
and nothing exported, unless the server was started with ``--enable-metrics``.

Gauges are in the mode ``mostrecent``: where an operator chose the folder it outlives a server, and the process that
wrote last counts. Counters go on from where a process of the same rank has left them there, as counters may.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Final, ParamSpec

from .. import __version__
from ..config import CHECKS
from ..runtime.figures import Sweep, Vitals
from ..tiers.outcomes import PageTotals
from .reporter import DEVICE, UNLISTED

logger = logging.getLogger("kvcanary")

STATES: Final = ("starting", "guarding", "paused", "waiting", "released", "detached", "uncovered")
HOST: Final = "host"
STORAGE: Final = "storage"
STORAGE_CHECKS: Final = ("content", "identity")
# Name without prefix: labels beyond rank and pool, and what it is. The pool is the main one but where slots are counted
# that belong to a numbering of their own, and where pages are.
COUNTERS: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "violations": (("check", "tier"), "Damaged slots and pages as often as a check saw them, repeats included."),
    "forwards": ((), "Forwards guarded."),
    "verified_slots": ((), "Slot entries whose records were checked because a forward was about to read them."),
    "stored_slots": ((), "Slots that forwards stored and whose records were made."),
    "folded_slots": ((), "Slots that the rotating and the idle pass went over."),
    "folded_bytes": ((), "Bytes of the slots that the rotating and the idle pass went over."),
    "scrub_passes": ((), "Times that the rotating and the idle pass together went over the whole pool."),
    "ended_requests": ((), "Requests that mode quarantine ended with an error."),
    "storage_pages_verified": ((), "Pages that came back from storage as they were stored."),
    "storage_pages_stored": ((), "Pages that were stored and whose digests are known."),
    "storage_pages_rejected": (("reason",), "Pages that came back from storage and were not used."),
    "host_seconds": (("during",), "Time in calls of kvcanary on the scheduler's thread."),
}
GAUGES: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "info": (("version", "mode", "checks"), "1 for what is in force, 0 for what was before."),
    "guard_state": (("state",), "1 for the state of the guard, 0 for the others."),
    "heartbeat_timestamp_seconds": ((), "When the figures were last brought up to date, in seconds since 1970."),
    "slots": ((), "Slots of the pool, padding included."),
    "resident_bytes": ((), "Device memory that kvcanary keeps beside the pool."),
    "scrub_period_forwards": ((), "Forwards within which the rotating pass goes over every slot."),
    "scrub_period_seconds": ((), "The same in seconds of short forwards back to back; absent until that is known."),
    "scrub_oldest_age_seconds": ((), "How long ago the slot was gone over that has waited longest."),
    "degraded": ((), "1 while there is more damage than is listed piece by piece."),
    "withheld_slots": ((), "Slots out of circulation until the cache is flushed."),
    "refused_slots": ((), "Damaged slots that still circulate because an eighth of the pool is withheld already."),
    "tainted_prefixes": ((), "Prefixes that are not reused until the cache is flushed."),
}

P = ParamSpec("P")


def _contained(method: Callable[Concatenate[Metrics, P], None]) -> Callable[Concatenate[Metrics, P], None]:
    """An error ends the metrics, and nothing else. The time of the last heartbeat then stands still."""

    @functools.wraps(method)
    def contained(self: Metrics, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.is_broken:
            return
        try:
            method(self, *args, **kwargs)
        except Exception:
            self.is_broken = True
            logger.exception("kvcanary: metrics are no longer exported; the guard goes on")

    return contained


class Metrics:
    """All series of one rank.

    Attributes:
        registry: of ``prometheus_client``, this object's own.
        is_broken: an error of ``prometheus_client`` or the folder's file system has ended them.
    """

    def __init__(
        self,
        rank: int,
        pool: str = "",
        *,
        slots: Mapping[str, int] | None = None,
        states: Sequence[str] = (),
        resident_bytes: int = 0,
    ) -> None:
        """Make every series there will be, at zero, so that the first increase of a counter is seen as one.

        Args:
            rank: of this process.
            pool: main pool; empty where nothing is guarded.
            slots: slots of each numbering by the name that reports have for it, ``pool`` among them.
            states: names that reports have for watched states.
            resident_bytes: kept beside the pool.

        Raises:
            ImportError: ``prometheus_client`` is not installed.
            OSError: the folder cannot be written to.
        """
        from prometheus_client import CollectorRegistry, Counter, Gauge

        self.registry = CollectorRegistry()
        self.is_broken = False
        self._rank, self._pool = str(rank), pool
        self._families: dict[str, Any] = {}
        for name, (labels, text) in COUNTERS.items():
            self._families[name] = Counter(f"kvcanary_{name}", text, ("rank", "pool", *labels), registry=self.registry)
        for name, (labels, text) in GAUGES.items():
            self._families[name] = Gauge(
                f"kvcanary_{name}",
                text,
                ("rank", "pool", *labels),
                registry=self.registry,
                multiprocess_mode="mostrecent",
            )
        self._series: dict[tuple[str, ...], Any] = {}
        self._shown: dict[tuple[str, ...], float] = {}
        self._info: tuple[str, ...] | None = None
        sizes = {} if slots is None else dict(slots)
        for watched in (*sizes, *states):
            for check in CHECKS:
                self._find("violations", watched, check, DEVICE)
        self._find("violations", pool, UNLISTED, DEVICE)
        for name, count in sizes.items():
            self._set(count, "slots", name)
        self._set(resident_bytes, "resident_bytes", pool)

    @_contained
    def count_violations(self, check: str, tier: str, pool: str, number: int) -> None:
        """Violations were found. May be called from any thread."""
        self._find("violations", pool or self._pool, check, tier).inc(number)

    @_contained
    def show(self, vitals: Vitals) -> None:
        """Bring everything else up to date."""
        pool, figures = self._pool, vitals.figures
        self._follow(figures.forwards, "forwards", pool)
        self._follow(figures.verified, "verified_slots", pool)
        self._follow(figures.stored, "stored_slots", pool)
        for sweep in figures.sweeps:
            self._show_sweep(sweep)
        if vitals.has_host:
            self._find("violations", pool, "content", HOST)
            self._find("violations", f"{pool}/host", "ownership", HOST)
        for name, pages in vitals.pages.items():
            self._show_pages(name, pages)
        self._follow(vitals.serving_seconds, "host_seconds", pool, "serving")
        self._follow(vitals.idle_seconds, "host_seconds", pool, "idle")
        totals = vitals.quarantine
        self._follow(totals.get("ended_total", 0), "ended_requests", pool)
        self._set(totals.get("state") == "degraded", "degraded", pool)
        self._set(totals.get("withheld_slots", 0), "withheld_slots", pool)
        self._set(totals.get("refused_slots", 0), "refused_slots", pool)
        self._set(totals.get("tainted_points", 0), "tainted_prefixes", pool)
        info = (__version__, vitals.mode, "+".join(vitals.checks))
        if self._info not in (None, info):
            self._set(0, "info", pool, *self._info)
        self._info = info
        self._set(1, "info", pool, *info)
        for state in STATES:
            self._set(vitals.state == state, "guard_state", pool, state)
        self._set(time.time(), "heartbeat_timestamp_seconds", pool)

    def _show_sweep(self, sweep: Sweep) -> None:
        self._follow(sweep.folded, "folded_slots", sweep.pool)
        self._follow(sweep.folded_bytes, "folded_bytes", sweep.pool)
        self._follow(sweep.passes, "scrub_passes", sweep.pool)
        self._set(sweep.period_forwards, "scrub_period_forwards", sweep.pool)
        if sweep.period_seconds is not None:
            self._set(sweep.period_seconds, "scrub_period_seconds", sweep.pool)
        self._set(sweep.oldest_unverified_seconds, "scrub_oldest_age_seconds", sweep.pool)

    def _show_pages(self, pool: str, pages: PageTotals) -> None:
        for check in STORAGE_CHECKS:
            self._find("violations", pool, check, STORAGE)
        self._follow(pages.verified, "storage_pages_verified", pool)
        self._follow(pages.stored, "storage_pages_stored", pool)
        for reason, count in pages.rejected.items():
            self._follow(count, "storage_pages_rejected", pool, reason)

    def _find(self, name: str, *labels: str) -> Any:
        series = self._series.get((name, *labels))
        if series is None:
            series = self._series[(name, *labels)] = self._families[name].labels(self._rank, *labels)
        return series

    def _set(self, value: float, name: str, *labels: str) -> None:
        self._find(name, *labels).set(value)

    def _follow(self, total: float, name: str, *labels: str) -> None:
        """Raise a counter by what ``total`` has grown since it was last told."""
        key = (name, *labels)
        series = self._find(*key)
        grown = total - self._shown.get(key, 0)
        if grown > 0:
            series.inc(grown)
            self._shown[key] = total
