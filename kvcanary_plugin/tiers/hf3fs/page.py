"""What goes into a page file and what comes out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

KEY_BYTES = 16


@dataclass(frozen=True)
class PageWrite:
    """Store a page. ``parts`` are contiguous CPU tensors (or buffers) of any dtype, which may lie apart in memory:
    the page is their bytes one after the other, exactly ``Geometry.payload_bytes`` of them. ``records`` is opaque,
    at most ``Geometry.records_bytes``.
    """

    key: bytes
    slot: int
    parts: Sequence[Any]
    records: bytes = b""


@dataclass(frozen=True)
class PageRead:
    """Fetch a page into ``parts``. If the verdict is not ok, anything may be in them."""

    key: bytes
    slot: int
    generation: int
    parts: Sequence[Any]


@dataclass(frozen=True)
class Verdict:
    """Whether a page was read and is what was stored.

    ``reason`` is ``ok`` or why it is a miss:
    ``free`` (nothing is stored in the slot), ``writing`` (a write was not finished), ``quarantined``,
    ``key`` and ``generation`` (the slot holds another page, or another version of it),
    ``io-error`` (of the medium or the transport; ``errno`` says which), ``short`` (the file ends early),
    ``hole`` (nothing but zeros came), ``digest`` (other bytes came than were stored).
    """

    reason: str
    records: bytes = b""
    errno: int = 0

    @property
    def ok(self) -> bool:
        """Whether the destination holds exactly the page that was asked for."""
        return self.reason == "ok"


@dataclass(frozen=True)
class PageEntry:
    """A committed page that a scan found."""

    key: bytes
    slot: int
    generation: int
    payload_bytes: int


@dataclass
class Counters:
    """What a page file has done since it was opened. ``misses`` and ``failed_writes`` are by reason."""

    reads: int = 0
    writes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    re_reads: int = 0
    quarantined: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    failed_writes: Counter[str] = field(default_factory=Counter)
