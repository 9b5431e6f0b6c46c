"""What became of the pages of a storage backend, in the same few words for every backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

VERIFIED = frozenset(("hit", "verified"))
STORED = frozenset(("stored",))
# Bytes came back and were not used. What is not in here never came, as pages that are not stored.
REJECTED = (
    # not what was stored
    *("digest", "hole", "short", "key", "generation", "free", "writing", "damaged"),
    # taken out of service before; could not be read; changed while it was read
    *("quarantined", "io-error", "raced"),
    # nobody knows what was stored; somebody else may have stored another version
    *("unknown", "unverified"),
)


@dataclass(slots=True)
class PageTotals:
    """Pages of one pool since the start.

    Attributes:
        rejected: by reason, one of ``REJECTED``: read and not handed to SGLang, which computes them afresh.
    """

    verified: int = 0
    stored: int = 0
    rejected: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REJECTED, 0))

    def add(self, counts: Mapping[str, int]) -> None:
        """Take in pages by outcome, as a backend counts them."""
        for outcome, pages in counts.items():
            if outcome in VERIFIED:
                self.verified += pages
            elif outcome in STORED:
                self.stored += pages
            elif outcome in self.rejected:
                self.rejected[outcome] += pages

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without reasons that did not occur."""
        rejected = {reason: pages for reason, pages in self.rejected.items() if pages}
        return {"verified": self.verified, "stored": self.stored, "rejected": rejected}


def total_pages(statuses: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, PageTotals]:
    """Pages by pool, of several backends that say how many by pool and outcome."""
    totals: dict[str, PageTotals] = {}
    for status in statuses:
        for pool, counts in status.items():
            totals.setdefault(pool, PageTotals()).add(counts)
    return totals
