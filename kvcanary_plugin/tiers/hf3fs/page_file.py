"""One file of KV pages that never returns other bytes than were stored for a key: the worst outcome is a miss."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from .client import Client
from .crew import Crew
from .errors import PageFileError
from .geometry import Geometry
from .header import Header, read_header, write_header
from .layout import SLOTS_PER_SEGMENT, Layout
from .opening import flock_decides, make_client, open_for_reading, open_for_writing
from .page import KEY_BYTES, Counters, PageEntry, PageRead, PageWrite, Verdict
from .reader import PageReader
from .table import TrailerTable, as_slots
from .trailer import COMMITTED, QUARANTINED, STATE_NAMES
from .writer import PageWriter

FENCE_SECONDS = 1.0  # how long a writer may go on after another one has taken the file over


class PageFile:
    """A page file that is open. Made by :meth:`open`; safe to use from several threads.

    ``slot_count`` slots of ``payload_bytes`` each; ``uuid`` (16 bytes) is for the life of the file, ``epoch`` one
    higher at each opening for writing; ``faults`` is what was found damaged while opening, ``counters`` what happened
    since.
    """

    def __init__(self, path: Path, fd: int, header: Header, client: Client, read_only: bool, threads: int = 1) -> None:
        self.path, self.read_only = path, read_only
        self.slot_count, self.epoch, self.uuid = header.slot_count, header.epoch, header.uuid
        self.payload_bytes, self.records_bytes = header.geometry.payload_bytes, header.geometry.records_bytes
        self.counters = Counters()
        self._fd, self._client, self._closed = fd, client, False
        self._crew = Crew(threads)
        self._table = TrailerTable(header, client)
        self.faults = list(self._table.faults)
        self._lock = threading.Lock()  # of counters, busy slots and generations; never held during I/O
        self._header_lock = threading.Lock()
        self._fence_at = time.monotonic() + FENCE_SECONDS
        self._superseded = False
        self._reader = PageReader(
            *(self._table, client, self._crew, self.counters, self._lock),
            self._refresh if read_only else None,
            self._quarantine,
        )
        self._writer = PageWriter(self._table, client, self._crew, self.counters, self._lock, self._may_write)

    @classmethod
    def open(
        cls,
        path: str | Path,
        geometry: Geometry,
        *,
        capacity_bytes: int,
        client: str | Callable[..., Client] = "local",
        create: bool = True,
        o_direct: bool = False,
        threads: int = 1,
        check_threads: int = 0,
        read_only: bool = False,
        takeover: bool = False,
    ) -> PageFile:
        """Open a page file, or make one.

        ``capacity_bytes`` is the size of the whole file; one that exists must have been made with the same number of
        slots. ``client`` is ``local`` (``o_direct`` bypasses the page cache), ``usrbio``, or what makes one: it is
        called with path, size, bytes_per_page and ``read_only``, like ``functools.partial(UsrbioClient, rings=2)``.
        ``threads`` work on each batch, the caller being one of them, and ``check_threads`` more where that many cores
        are free for the check. ``read_only`` is for a file that a process on another host writes: no lock is taken,
        and what that process commits is seen. ``takeover`` is for a file on a shared mount whose last writer, on
        another host, is known to be dead.

        Raises ``InUse``, ``GeometryMismatch``, ``CapacityMismatch``, ``NotAPageFile``, or another ``PageFileError``.
        """
        path = Path(path)
        try:
            layout = Layout.fit(geometry, capacity_bytes)
        except ValueError as error:
            raise PageFileError(f"{path}: {error}; ask for more") from error
        if read_only:
            fd, header = open_for_reading(path, geometry)
        else:
            fd, header = open_for_writing(
                path, geometry, layout, create=create, may_take=takeover or flock_decides(client)
            )
        made: Client | None = None
        try:
            made = make_client(client, path, header.layout, o_direct, read_only)
            return cls(path, fd, header, made, read_only, threads + check_threads)
        except BaseException:
            if made is not None:
                made.close()
            os.close(fd)
            raise

    def write(self, batch: Sequence[PageWrite]) -> list[int | None]:
        """Store pages, replacing what is in their slots. Returns the generation of each, or None where it could not
        be stored, which is counted by reason. Raises ``ValueError``, before anything is done, on a page that has the
        wrong size or names the wrong slot.
        """
        if self.read_only:
            raise PageFileError(f"{self.path} is open for reading only: open it for writing where nobody else does")
        return self._writer.write(batch)

    def read(self, batch: Sequence[PageRead]) -> list[Verdict]:
        """Fetch pages and verify them at their destination. Where the verdict is not ok, anything may be there. A page
        that does not verify is read once more and then quarantined; an error of the medium or the transport is a miss
        and leaves the page alone. Raises ``ValueError`` like ``write``.
        """
        return self._reader.read(batch)

    def discard(self, slots: Iterable[int]) -> None:
        """Make slots free. One that is just being written is left alone."""
        with self._lock:
            gone = as_slots(slot for slot in slots if slot not in self._writer.busy)
            self._table.free(gone)
        if len(gone) and self._may_write():
            self._table.store(gone)

    def quarantine(self, slots: Iterable[int]) -> None:
        """Take the pages in some slots out of service, until others are written there."""
        records = self._table.take(as_slots(slots))
        self._quarantine(zip(records["slot"].tolist(), records["generation"].tolist(), strict=True))

    def clear(self) -> None:
        """Drop all pages at once and for good, by one write of the header. Raises ``OSError``."""
        with self._header_lock:
            if self._closed or self.read_only or not self._owns_file():
                raise PageFileError(f"{self.path} is not open for writing here: its pages cannot be dropped")
            header = self._table.header
            header = header.next(salt=header.salt % (2**32 - 1) + 1)
            write_header(self._fd, header)
            self._table.adopt(header)

    def scan(self) -> Iterator[PageEntry]:
        """Every committed page; of several with the same key, the newest."""
        seen: set[bytes] = set()
        for entry in self.committed():
            if entry.key not in seen:
                seen.add(entry.key)
                yield entry

    def committed(self) -> Iterator[PageEntry]:
        """Every committed page, the newest first, without regard to keys."""
        records = self._table.take_all()
        records = records[records["state"] == COMMITTED]
        records = records[np.argsort(records["generation"], kind="stable")[::-1]]
        keys, size = records["key"].tobytes(), self.payload_bytes
        places = zip(records["slot"].tolist(), records["generation"].tolist(), strict=True)
        for index, (slot, generation) in enumerate(places):
            yield PageEntry(keys[index * KEY_BYTES : (index + 1) * KEY_BYTES], slot, generation, size)

    def quarantined_slots(self) -> list[int]:
        """Slots whose page was found damaged."""
        found: list[int] = np.flatnonzero(self._table.take_all()["state"] == QUARANTINED).tolist()
        return found

    def repair(self) -> int:
        """Free the slots of damaged pages and write damaged trailer blocks anew. Returns how many pages are dropped."""
        slots = self.quarantined_slots()
        self.discard(slots)
        if self._may_write():
            self._table.rewrite_damaged()
        return len(slots)

    def count_states(self) -> dict[str, int]:
        """How many slots are free, being written, committed and quarantined."""
        counts = np.bincount(self._table.take_all()["state"], minlength=len(STATE_NAMES)).tolist()
        return dict(zip(STATE_NAMES, counts, strict=True))

    def count_with_records(self) -> int:
        """How many committed pages have records that were made on the GPU."""
        records = self._table.take_all()
        return int(((records["state"] == COMMITTED) & (records["records_bytes"] > 0)).sum())

    def flush(self) -> None:
        """Make what was written durable, as far as the medium can. Raises ``OSError``."""
        self._client.flush()

    def close(self) -> None:
        """Wait for transfers under way and release the file. May be called more than once."""
        with self._header_lock:
            if self._closed:
                return
            self._closed = True
            try:
                if not self.read_only and self._owns_file():
                    self._client.flush()
                    write_header(self._fd, self._table.header.next(opened=False))
            finally:
                self._crew.close()
                self._client.close()
                os.close(self._fd)

    def __enter__(self) -> PageFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _quarantine(self, pages: Iterable[tuple[int, int]]) -> None:
        wanted = dict(pages)
        with self._lock:
            slots = as_slots(slot for slot in wanted if slot not in self._writer.busy)
            records = self._table.take(slots)
            same = (records["state"] == COMMITTED) & (
                records["generation"] == [wanted[slot] for slot in slots.tolist()]
            )
            slots, records = slots[same], records[same]
            self._table.put(slots, records, QUARANTINED)
            self.counters.quarantined += len(slots)
        if len(slots) and not self.read_only and self._may_write():
            self._table.store(slots)

    def _may_write(self) -> bool:
        """Whether this process still owns the file, looked up now and then."""
        if self.read_only or self._closed or self._superseded:
            return False
        if time.monotonic() >= self._fence_at:
            with self._header_lock:
                self._superseded = self._closed or not self._owns_file()
                self._fence_at = time.monotonic() + FENCE_SECONDS
        return not self._superseded

    def _owns_file(self) -> bool:
        try:
            header, _ = read_header(self._fd, str(self.path))
        except (OSError, PageFileError):
            return False
        return header.epoch == self.epoch and header.uuid == self.uuid

    def _refresh(self, slot: int) -> None:
        """Follow the writer of the file: its header, then the block of one slot."""
        with self._header_lock:
            if self._closed:
                return
            try:
                header, _ = read_header(self._fd, str(self.path))
            except (OSError, PageFileError):
                return
            if header.salt != self._table.header.salt:
                self._table.adopt(header)
            self._table.refresh(slot // SLOTS_PER_SEGMENT)
