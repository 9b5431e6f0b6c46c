"""How times, counts and slots are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone

from .text import quote_clause

MAX_TOLD = 8
MAX_COUNTS = 16


def show_time(time: float, *, with_date: bool = True) -> str:
    """Seconds since 1970 as UTC: ``2026-01-31 23:59:59``."""
    moment = datetime.fromtimestamp(time, timezone.utc)
    return f"{moment:%Y-%m-%d %H:%M:%S}" if with_date else f"{moment:%H:%M:%S}"


def show_slots(slots: Sequence[int], limit: int = MAX_TOLD) -> str:
    """Sorted slots as ranges: ``3..7, 9``; of many, the first."""
    ranges: list[list[int]] = []
    for slot in slots:
        if ranges and slot == ranges[-1][1] + 1:
            ranges[-1][1] = slot
        else:
            ranges.append([slot, slot])
    told = [str(first) if first == last else f"{first}..{last}" for first, last in ranges[:limit]]
    return ", ".join(told) + (", ..." if len(ranges) > limit else "")


def show_duration(seconds: float) -> str:
    """As ``12 s``, ``3 min`` or ``5.2 h``."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def show_many(count: int, noun: str) -> str:
    """``1 page``, ``2 pages``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def show_counts(counts: Mapping[str, int]) -> str:
    """``content 3, chain 1``; of many, the most frequent."""
    told = [f"{quote_clause(name)[:80]} {count}" for name, count in list(counts.items())[:MAX_COUNTS]]
    return ", ".join(told) + (", ..." if len(counts) > MAX_COUNTS else "")


def show_count(count: int) -> str:
    """``12,345``."""
    return f"{count:,}"
