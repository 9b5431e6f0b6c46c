"""The index of a page file: which key lives in which slot, and which slot goes next.

It is a cache of what the page file says about itself. Losing it costs a scan; being wrong costs a miss, because every
read is verified against the file's own record. Two implementations satisfy one contract: SQLite for the ranks of one
host, Redis for several hosts on one namespace.

One key, one page: K and V, every layer, are one entry, so there are no half pages. A page is in one of three states::

    free --reserve--> writing --commit--> committed --evict/withdraw--> free / retired
                         \\--abort--> free

A *lease* is what a reader holds from ``lookup`` to ``release``: a leased slot is not given to anybody else. Leases run
out, so a reader that died does not hold a slot for ever; a reader that outlives its lease sees the slot's next
generation and treats it as a miss.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...errors import KvcanaryError

KEY_BYTES = 16
LEASE_S = 30.0
WRITE_DEADLINE_S = 60.0


class IndexUnavailableError(KvcanaryError):
    """The index cannot be reached now. The store counts it and answers with misses."""


class IndexLostError(IndexUnavailableError):
    """The index was reached but does not know this page file: it has to be rebuilt by scan."""


class Held(enum.Enum):
    """Why a key was not reserved although there is room: storing it again would be wasted work."""

    COMMITTED = "committed"
    WRITING = "writing"


@dataclass(frozen=True, slots=True)
class Reservation:
    """A slot that only its holder may write. No ``token`` is used twice, so a late commit of a lost one is refused."""

    key: bytes
    slot: int
    token: int


@dataclass(frozen=True, slots=True)
class Location:
    """Where a committed page is.

    Attributes:
        key: 16 bytes.
        file: hex uuid of the page file; another host's where several share the namespace.
        slot, generation: which page of that file.
        lease: names the lease to :meth:`PageIndex.release`; 0 if none was taken.
    """

    key: bytes
    file: str
    slot: int
    generation: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """A committed page as the scan of a page file reports it."""

    key: bytes
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class IndexCounts:
    """Slots of this file by state."""

    committed: int
    writing: int
    retired: int
    slots: int

    @property
    def free(self) -> int:
        """Slots that can be reserved without evicting anything."""
        return self.slots - self.committed - self.writing - self.retired


class PageIndex(Protocol):
    """Synchronous, safe to call from several threads, atomic per call. Raises :class:`IndexUnavailableError` only."""

    file: str

    def reserve(self, keys: Sequence[bytes]) -> list[Reservation | Held | None]:
        """A free slot for each key, or that of the least recently used page nobody reads.

        Keys that are committed count as used now and are not evicted by the rest of the batch. A key that occurs twice
        is ``Held.WRITING`` the second time. None: every slot is leased, being written or retired; the key is simply not
        stored.
        """

    def commit(self, written: Sequence[tuple[Reservation, int]]) -> list[bool]:
        """Publish pages with their generation. False: the reservation was lost meanwhile; the caller aborts it."""

    def abort(self, reservations: Sequence[Reservation]) -> None:
        """Free the slots of reservations that will not be committed. Nobody may still be writing to them."""

    def lookup(self, keys: Sequence[bytes]) -> list[Location | None]:
        """Where the pages are, each leased and marked as used now."""

    def release(self, locations: Sequence[Location]) -> None:
        """End leases. Releasing one that ran out is fine."""

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key is committed; marks it as used now, since a get follows."""

    def is_current(self, location: Location) -> bool:
        """Whether the key still lives in that slot and generation: tells a damaged page from one that was reused."""

    def withdraw(self, locations: Sequence[Location], *, retire: bool) -> None:
        """Drop pages that cannot be served, if they are still where it says. ``retire``: never reuse the slot."""

    def retire(self, reservations: Sequence[Reservation]) -> None:
        """Like :meth:`abort`, for slots that must not be used again."""

    def evict(self, keys: Sequence[bytes] | None) -> list[Reservation]:
        """Forget pages of this file, all of them for None, read or not.

        The caller gets their slots as reservations without a key, has the page file forget them too, and then aborts
        the reservations: only then can the slots be used again.
        """

    def attach(self, slot_count: int, epoch: int) -> bool:
        """Take the file over as its one writer, of which ``epoch`` is the page file's count.

        Frees what an earlier writer left reserved and ends its leases. False: the index does not describe this file as
        it was left (new, another life of the file, another size, written behind its back, or the machine went down
        since), and :meth:`rebuild` has to follow.
        """

    def rebuild(self, entries: Iterable[Entry], slot_count: int, epoch: int) -> int:
        """Replace all that is known of this file by what a scan found. Returns how many pages are committed."""

    def path_of(self, file: str) -> str | None:
        """Where another host's page file is; None if it is not known."""

    def counts(self) -> IndexCounts:
        """Slots by state."""

    def close(self) -> None:
        """Idempotent. Leaves the index warm."""


def keep_newest(entries: Iterable[Entry]) -> list[Entry]:
    """One entry a key, that of the highest generation."""
    newest: dict[bytes, Entry] = {}
    for entry in entries:
        held = newest.get(entry.key)
        if held is None or entry.generation > held.generation:
            newest[entry.key] = entry
    return list(newest.values())


def spread(keys: Sequence[bytes], outcomes: Mapping[bytes, Reservation | Held]) -> list[Reservation | Held | None]:
    """Outcomes in the order of ``keys``; a key that is repeated is being written by its first occurrence."""
    seen: set[bytes] = set()
    result: list[Reservation | Held | None] = []
    for key in keys:
        outcome = outcomes.get(key)
        result.append(Held.WRITING if key in seen and isinstance(outcome, Reservation) else outcome)
        seen.add(key)
    return result


def lease_once(keys: Sequence[bytes], found: Mapping[bytes, Location]) -> list[Location | None]:
    """Locations in the order of ``keys``; a key that is repeated has one lease, on its first occurrence."""
    seen: set[bytes] = set()
    result: list[Location | None] = []
    for key in keys:
        place = found.get(key)
        result.append(dataclasses.replace(place, lease=0) if place is not None and key in seen else place)
        seen.add(key)
    return result
