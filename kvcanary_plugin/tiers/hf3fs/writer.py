"""Writing pages: slots are marked, payloads written and hashed in one pass, and then the records committed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from .client import Batch, Client
from .crew import Crew
from .page import Counters, PageWrite
from .reader import check_pages
from .table import Slots, TrailerTable, as_slots
from .trailer import COMMITTED


class PageWriter:
    """Writes pages. ``may_write`` is asked before each batch. No two pages of a file ever have the same generation."""

    def __init__(
        self,
        table: TrailerTable,
        client: Client,
        crew: Crew,
        counters: Counters,
        lock: threading.Lock,
        may_write: Callable[[], bool],
    ) -> None:
        self._table, self._client, self._crew, self._counters, self._lock = table, client, crew, counters, lock
        self._may_write = may_write
        self._generation = table.header.epoch << 40
        self.busy: set[int] = set()

    def write(self, batch: Sequence[PageWrite]) -> list[int | None]:
        """The generation of each page, or None where it could not be stored. Raises ``ValueError``, before anything is
        done, on a page that makes no sense.
        """
        geometry = self._table.header.geometry
        parts = check_pages(batch, geometry.payload_bytes, self._table.header.slot_count)
        check_writes(batch, geometry.records_bytes)
        if not self._may_write():
            self._count(0, {"superseded": len(batch)})
            return [None] * len(batch)
        stride = self._table.header.layout.stride
        return self._crew.run(len(batch), stride, lambda shard: self._write(batch[shard], parts[shard]))

    def _write(self, batch: Sequence[PageWrite], parts: list[list[memoryview]]) -> list[int | None]:
        claimed, first = self._claim(batch)
        generations: list[int | None] = [None] * len(batch)
        if not claimed:
            return generations
        if len(claimed) < len(batch):
            batch, parts = [batch[index] for index in claimed], [parts[index] for index in claimed]
        try:
            numbers = range(first, first + len(claimed))
            committed = self._store(batch, parts, numbers)
            for number in np.flatnonzero(committed).tolist():
                generations[claimed[number]] = numbers[number]
            return generations
        finally:
            with self._lock:
                self.busy.difference_update([page.slot for page in batch])

    def _claim(self, batch: Sequence[PageWrite]) -> tuple[list[int], int]:
        """Claim the slots, except those that another thread is writing, and as many generations."""
        with self._lock:
            busy = self.busy
            claimed = [index for index, page in enumerate(batch) if page.slot not in busy]
            busy.update([batch[index].slot for index in claimed])
            first = self._generation + 1
            self._generation += len(claimed)
            if len(claimed) < len(batch):
                self._counters.failed_writes["busy"] += len(batch) - len(claimed)
        return claimed, first

    def _store(
        self, pages: Sequence[PageWrite], parts: list[list[memoryview]], generations: range
    ) -> NDArray[np.bool_]:
        """Write pages to their claimed slots. Returns which of them are committed."""
        table, layout = self._table, self._table.header.layout
        slots = as_slots([page.slot for page in pages])
        marked = self._mark(slots)
        # In this order: should all pages be dropped in between, these records are of the earlier life, and void.
        records = table.make(slots, [page.key for page in pages], generations, [len(page.records) for page in pages])
        digest = table.digest
        chosen = np.flatnonzero(marked).tolist()
        if layout.tail_bytes:
            for index in chosen:
                parts[index].append(memoryview(pages[index].records.ljust(layout.tail_bytes, b"\0")))
        batch = Batch(
            (layout.data_offset + slots[marked] * layout.stride).tolist(),
            parts if len(chosen) == len(parts) else [parts[index] for index in chosen],
            [layout.stride] * len(chosen),
            digest=True,
        )
        self._client.write(batch)
        assert batch.digests is not None
        written = np.array(batch.results, np.int64) == layout.stride
        good = np.flatnonzero(marked)[written]
        digests = [batch.digests[index] for index in np.flatnonzero(written)]
        records, done = records[good], slots[good]
        committed = np.zeros(len(pages), np.bool_)
        if len(good):
            records["digest"] = digest.seal(records, digests)
            table.put(done, records, COMMITTED)
            stored = table.store(done)
            if not stored.all():
                table.mark(done[~stored])
            committed[good[stored]] = True
        unmarked, unwritten = int((~marked).sum()), int((~written).sum())
        lost = len(pages) - unmarked - unwritten - int(committed.sum())
        self._count(int(committed.sum()), {"trailer": unmarked + lost, "payload": unwritten})
        return committed

    def _mark(self, slots: Slots) -> NDArray[np.bool_]:
        """Make it known that slots are being overwritten. Returns which may be.

        What the file calls committed is marked there too: else a crash before the commit would look like damage later.
        """
        table = self._table
        table.mark(slots)
        stored = table.may_be_stored(slots)
        marked = np.ones(len(slots), np.bool_)
        if stored.any():
            marked[stored] = table.store(slots[stored])
        return marked

    def _count(self, committed: int, failed: dict[str, int]) -> None:
        counters = self._counters
        with self._lock:
            counters.writes += committed
            counters.written_bytes += committed * self._table.header.geometry.payload_bytes
            counters.failed_writes.update({reason: count for reason, count in failed.items() if count})


def check_writes(batch: Sequence[PageWrite], records_bytes: int) -> None:
    """Raise ``ValueError`` naming the first entry with too many records or a slot that an earlier entry has."""
    slots = [page.slot for page in batch]
    if len(set(slots)) < len(slots):
        number = next(number for number, slot in enumerate(slots) if slot in slots[:number])
        raise ValueError(f"entry {number}: slot {slots[number]} occurs twice in one batch")
    for number, page in enumerate(batch):
        if len(page.records) > records_bytes:
            raise ValueError(f"entry {number}: {len(page.records)} bytes of records; this file holds {records_bytes}")
