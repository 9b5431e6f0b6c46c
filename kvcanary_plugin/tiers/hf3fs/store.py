"""A page file and an index as one store: pages go in under a key and come out verified, or do not come out.

The order of steps is what makes a crash harmless: a slot leaves the index before it is written, and enters it after its
record is in the file. The order of the *verdicts* is what keeps damage apart from races: a page that does not verify is
damaged only if the index, asked again while the lease is held, still names the same slot and generation.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .index import Entry, IndexLostError, IndexUnavailableError, Location, PageIndex, Reservation
from .other_files import OtherFiles
from .page import PageRead, PageWrite, Verdict
from .page_file import PageFile

logger = logging.getLogger("kvcanary")

MAX_FAILED_WRITES = 2  # of one slot, before it is left alone
_HARMLESS = frozenset(("io-error", "quarantined"))
ABSENT = Verdict("absent")
CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Damage:
    """A page that the index promised and the file could not deliver.

    Attributes:
        number: which page of the batch.
        reason: the verdict's.
        place: file, slot and generation.
    """

    number: int
    reason: str
    place: Location


class PageStore:
    """Safe to call from several threads. Failures of index and file are misses, counted by reason; none is raised.

    Args:
        file: open for writing, or read-only: then every ``set`` is refused.
        index: of that file.
        open_other: opens the page file of another host read-only, see :class:`OtherFiles`.
        on_damage: told of damaged pages, from the thread that read them.

    Attributes:
        counts: pages by outcome: ``hit``, ``absent``, ``raced`` and the reasons of verdicts; ``stored``, ``duplicate``,
            ``exhausted``, ``write-failed``, ``write-lost``; ``index-unavailable``, ``closed``, ``evicted``.
    """

    def __init__(
        self,
        file: PageFile,
        index: PageIndex,
        *,
        open_other: Callable[[str], PageFile | None] = lambda path: None,
        on_damage: Callable[[list[Damage]], None] = lambda damages: None,
    ) -> None:
        self.file = file
        self.index = index
        self.counts: Counter[str] = Counter()
        self._others = OtherFiles(index, open_other)
        self._on_damage = on_damage
        self._failed_writes: Counter[int] = Counter()
        self._calls = 0
        self._is_closed = False
        self._idle = threading.Condition()
        self._recovery = threading.Lock()
        self._recoveries = 0
        self._counting = threading.Lock()
        self._warned_at = float("-inf")
        if not file.read_only and not index.attach(file.slot_count, file.epoch):
            self.rebuild()

    def rebuild(self) -> int:
        """Make the index anew from the page file. Returns how many pages it holds.

        Raises:
            IndexUnavailableError: the index cannot be reached.
        """
        entries = (Entry(page.key, page.slot, page.generation) for page in self.file.scan())
        return self.index.rebuild(entries, self.file.slot_count, self.file.epoch)

    def set(self, keys: Sequence[bytes], pages: Sequence[Sequence[Any]], records: Sequence[bytes] = ()) -> list[bool]:
        """Store pages, each given by its pieces. True: it is there, or is just being written by somebody."""
        stored = [False] * len(keys)
        with self._call(len(keys)) as is_open:
            if not is_open or self.file.read_only:
                return stored
            recoveries = self._recoveries
            try:
                outcomes = self.index.reserve(keys)
            except IndexLostError:
                self._recover(recoveries)
                outcomes = self.index.reserve(keys)
            held: dict[int, Reservation] = {}
            for number, outcome in enumerate(outcomes):
                if isinstance(outcome, Reservation):
                    held[number] = outcome
                else:
                    stored[number] = outcome is not None
                    self._count("exhausted" if outcome is None else "duplicate", 1)
            try:
                for number in self._write(held, pages, records):
                    stored[number] = True
            finally:
                self._give_back(held)
        return stored

    def _write(
        self, held: dict[int, Reservation], pages: Sequence[Sequence[Any]], records: Sequence[bytes]
    ) -> list[int]:
        """Write and publish. Takes what it has published out of ``held``; returns the numbers of those pages."""
        if not held:
            return []
        numbers = list(held)
        batch = [PageWrite(held[n].key, held[n].slot, pages[n], records[n] if records else b"") for n in numbers]
        generations = self.file.write(batch)
        written = [
            (n, generation) for n, generation in zip(numbers, generations, strict=True) if generation is not None
        ]
        for n, generation in zip(numbers, generations, strict=True):
            slot = held[n].slot
            if generation is None:
                self._failed_writes[slot] += 1
            else:
                self._failed_writes.pop(slot, None)
        self._count("write-failed", len(numbers) - len(written))
        published = []
        committed = self.index.commit([(held[n], generation) for n, generation in written])
        for (n, _), is_committed in zip(written, committed, strict=True):
            if is_committed:
                del held[n]
                published.append(n)
        self._count("stored", len(published))
        self._count("write-lost", len(written) - len(published))
        return published

    def _give_back(self, held: dict[int, Reservation]) -> None:
        """Slots that were reserved and not published. One that cannot be written is not used again."""
        bad = [r for r in held.values() if self._failed_writes[r.slot] >= MAX_FAILED_WRITES]
        good = [r for r in held.values() if self._failed_writes[r.slot] < MAX_FAILED_WRITES]
        with contextlib.suppress(IndexUnavailableError):  # it takes them back by itself, later
            if good:
                self.index.abort(good)
            if bad:
                self.index.retire(bad)

    def get(self, keys: Sequence[bytes], pages: Sequence[Sequence[Any]]) -> list[Verdict]:
        """Fetch pages into their pieces. Where the verdict is not ok, anything may be in them."""
        verdicts = [ABSENT] * len(keys)
        with self._call(len(keys)) as is_open:
            if not is_open:
                return verdicts
            places = self.index.lookup(keys)
            try:
                for number, verdict in self._read(places, keys, pages):
                    verdicts[number] = verdict
                self._judge(places, verdicts)
            finally:
                with contextlib.suppress(IndexUnavailableError):  # a lease runs out by itself
                    self.index.release([place for place in places if place is not None])
            with self._counting:
                self.counts.update("hit" if verdict.ok else verdict.reason for verdict in verdicts)
        return verdicts

    def _read(
        self, places: Sequence[Location | None], keys: Sequence[bytes], pages: Sequence[Sequence[Any]]
    ) -> Iterator[tuple[int, Verdict]]:
        by_file: dict[str, list[int]] = {}
        for number, place in enumerate(places):
            if place is not None:
                by_file.setdefault(place.file, []).append(number)
        for numbers in by_file.values():
            found = [(n, place) for n in numbers if (place := places[n]) is not None]
            places_there = [place for _, place in found]
            is_own = places_there[0].file == self.file.uuid.hex()
            file = self.file if is_own else self._others.find(places_there)
            if file is not None:
                batch = [PageRead(keys[n], place.slot, place.generation, pages[n]) for n, place in found]
                yield from zip(numbers, file.read(batch), strict=True)

    def _judge(self, places: Sequence[Location | None], verdicts: list[Verdict]) -> None:
        """Tell damage from races, forget damaged pages and report them."""
        damages, gone = [], []
        for number, (place, verdict) in enumerate(zip(places, verdicts, strict=True)):
            if place is None or verdict.ok or verdict is ABSENT or verdict.reason == "io-error":
                continue
            if not self.index.is_current(place):
                verdicts[number] = Verdict("raced")
                continue
            gone.append(place)
            if verdict.reason not in _HARMLESS:
                damages.append(Damage(number, verdict.reason, place))
        if gone:
            self.index.withdraw(gone, retire=False)
        if damages:
            self._on_damage(damages)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each page is stored, by the index."""
        with self._call(0) as is_open:
            if is_open:
                return self.index.exists(keys)
        return [False] * len(keys)

    def evict(self, keys: Sequence[bytes] | None) -> int:
        """Forget pages of this process's file, all of them for None. Returns how many."""
        count = 0
        with self._call(0) as is_open:
            if is_open and not self.file.read_only:
                taken = self.index.evict(keys)
                self.file.discard([r.slot for r in taken])
                self.index.abort(taken)
                count = len(taken)
                self._count("evicted", count)
        return count

    def clear(self) -> int:
        """Forget all pages of this process's file."""
        return self.evict(None)

    def close(self) -> None:
        """Wait for calls under way, then close file and index. Later calls are misses. Idempotent."""
        with self._idle:
            if self._is_closed:
                return
            self._is_closed = True
            self._idle.wait_for(lambda: self._calls == 0, CLOSE_TIMEOUT_S)
        for name, part in (("page file", self.file), ("other page files", self._others), ("index", self.index)):
            try:
                part.close()
            except Exception:
                logger.exception("kvcanary: could not close the %s", name)

    @contextlib.contextmanager
    def _call(self, pages: int) -> Iterator[bool]:
        """One call from outside: counted while it runs; an index that cannot be reached makes it a miss."""
        with self._idle:
            is_open = not self._is_closed
            self._calls += is_open
        if not is_open:
            self._count("closed", pages)
            yield False
            return
        try:
            yield True
        except IndexUnavailableError as error:
            self._count("index-unavailable", pages)
            if isinstance(error, IndexLostError):
                self._warn("%s; pages are misses until it is made anew", error)
            else:
                self._warn("%s", error)
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def _recover(self, recoveries: int) -> None:
        """The index came back empty: make it anew, unless another thread has since it was seen lost."""
        with self._recovery:
            if self._recoveries == recoveries:
                pages = self.rebuild()
                self._recoveries += 1
                logger.warning("kvcanary: the index was lost; made anew with %d pages", pages)

    def _count(self, name: str, pages: int) -> None:
        if pages:
            with self._counting:
                self.counts[name] += pages

    def _warn(self, text: str, *arguments: object) -> None:
        """Once a minute; the rest is in the counts."""
        if time.monotonic() - self._warned_at > 60:
            self._warned_at = time.monotonic()
            logger.warning(text, *arguments)
