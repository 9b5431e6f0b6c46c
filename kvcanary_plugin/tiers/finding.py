"""What a tier found: a page that came back as something else than was stored. It is never served; here it is told.

Tiers work on SGLang's I/O threads, also where ``--kvcanary`` is off. So findings go through one function to whoever
listens: the reporter of the session if there is one, else the log.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Protocol

logger = logging.getLogger("kvcanary")

MAX_REMEMBERED = 65536

EXPLANATIONS = {
    "digest": "other bytes came back than were stored",
    "hole": "zeros came back; the bytes were never there, or are lost",
    "short": "fewer bytes came back than were stored",
    "key": "the slot of the file holds another page",
    "generation": "the slot of the file holds another version of the page",
    "free": "the index names a slot of the file in which nothing is stored",
    "writing": "the index names a slot of the file whose write was never finished",
    "scope": "the page was stored for another LoRA adapter, cache salt or weight version",
}
CHECK_OF_KIND = {
    **dict.fromkeys(("digest", "hole", "short"), "content"),
    **dict.fromkeys(("key", "generation", "free", "writing", "scope"), "identity"),
}


@dataclass(frozen=True, slots=True)
class TierViolation:
    """One page that failed verification on its way up.

    Attributes:
        kind: a key of ``EXPLANATIONS``.
        pool, rank: the host pool it was for, and the tensor-parallel rank.
        page_key: SGLang's key of the page.
        hop: where the bytes went wrong; they were last good ``last_good``.
        place: where the page was kept: file and slot, or the backend.
    """

    kind: str
    pool: str
    rank: int
    page_key: str
    place: str
    hop: str = "storage -> host"
    last_good: str = "in host memory, when it was stored"
    tier: str = "storage"

    @property
    def check(self) -> str:
        """``content`` or ``identity``."""
        return CHECK_OF_KIND[self.kind]

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two of them the same damage."""
        return (self.tier, self.check, self.pool, self.rank, self.page_key, self.place)

    @property
    def line(self) -> str:
        """Everything on one line, made for grep."""
        return (
            f'kvcanary: {self.check}/{self.kind} on {self.hop} of page {self.page_key} (pool "{self.pool}", rank '
            f"{self.rank}): {EXPLANATIONS[self.kind]}; {self.place}; last good {self.last_good}; counted as a miss"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"check": self.check, **asdict(self)}


class Listener(Protocol):
    """The part of the session's reporter that a tier needs."""

    def count(self, check: str, tier: str, pool: str) -> None:
        """Count a violation, repeats included."""

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """Write one event."""


_lock = threading.Lock()
_seen: Counter[tuple[Any, ...]] = Counter()
_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """From now on findings of this process go to ``listener`` too."""
    global _listener
    _listener = listener


def report(found: list[TierViolation]) -> None:
    """Log each piece of damage once and count the rest. Called from I/O threads; never raises."""
    for violation in found:
        with _lock:
            _seen[violation.key] += 1
            is_new = _seen[violation.key] == 1
            if len(_seen) > MAX_REMEMBERED:
                _seen.clear()
        try:
            if is_new:
                logger.error("%s", violation.line)
            if _listener is not None:
                _listener.count(violation.check, violation.tier, violation.pool)
                if is_new:
                    _listener.event("violation", violation.to_dict())
        except Exception:  # telling must never break serving
            logger.exception("kvcanary: could not report a finding of the storage tier")
