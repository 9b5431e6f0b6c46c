"""Reading pages: look up the records, transfer, verify at the destination, and only then say that a page is good."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from .checksum import MISSING
from .client import Batch, Client, view_bytes
from .crew import Crew
from .page import KEY_BYTES, Counters, PageRead, PageWrite, Verdict
from .table import Records, TrailerTable, as_slots
from .trailer import COMMITTED, STATE_NAMES

OK = Verdict("ok")


class PageReader:
    """Reads verified pages. ``refresh`` brings the record of a slot up to date where another process writes the file;
    ``quarantine`` takes the pages of ``(slot, generation)`` pairs out of service.
    """

    def __init__(
        self,
        table: TrailerTable,
        client: Client,
        crew: Crew,
        counters: Counters,
        lock: threading.Lock,
        refresh: Callable[[int], None] | None,
        quarantine: Callable[[Iterable[tuple[int, int]]], None],
    ) -> None:
        self._table, self._client, self._crew, self._counters, self._lock = table, client, crew, counters, lock
        self._refresh, self._quarantine = refresh, quarantine

    def read(self, batch: Sequence[PageRead]) -> list[Verdict]:
        """One verdict for each page. Raises ``ValueError``, before anything is done, on a page that makes no sense."""
        header = self._table.header
        parts = check_pages(batch, header.geometry.payload_bytes, header.slot_count)
        return self._crew.run(len(batch), header.layout.stride, lambda shard: self._read(batch[shard], parts[shard]))

    def _read(self, batch: Sequence[PageRead], parts: list[list[memoryview]]) -> list[Verdict]:
        header = self._table.header
        verdicts = [OK] * len(batch)
        records = self._table.take(as_slots([page.slot for page in batch]))
        for index in np.flatnonzero(find_mismatches(records, batch)).tolist():
            records[index], verdicts[index] = self._look_again(records[index], batch[index])
        wanted = [index for index, verdict in enumerate(verdicts) if verdict is OK]
        if tail_bytes := header.layout.tail_bytes:
            tails = memoryview(bytearray(len(wanted) * tail_bytes))
            for place, index in enumerate(wanted):
                parts[index].append(tails[place * tail_bytes : (place + 1) * tail_bytes])
        failed, results = self._transfer(wanted, records, parts)
        retried = len(failed)
        if failed:
            # Once more: on 3FS another replica may answer, and a fault of the transfer does not come twice.
            failed, results = self._transfer(failed, records, parts)
        if header.geometry.records_bytes:
            sizes = records["records_bytes"].tolist()
            for index in wanted:
                if sizes[index]:
                    verdicts[index] = Verdict("ok", bytes(parts[index][-1][: sizes[index]]))
        damaged = []
        for index in failed:
            verdicts[index] = self._judge(batch[index], parts[index], results[index])
            if verdicts[index].reason in ("short", "hole", "digest"):
                damaged.append((batch[index].slot, batch[index].generation))
        self._count(verdicts, retried)
        if damaged:
            self._quarantine(damaged)
        return verdicts

    def _look_again(self, record: np.void, page: PageRead) -> tuple[np.void, Verdict]:
        """The record of a page that was not found at first, and the verdict if it still is not there."""
        if self._refresh:
            self._refresh(page.slot)
            record = self._table.take(as_slots([page.slot]))[0]
        reason = name_mismatch(record, page)
        return record, Verdict(reason) if reason else OK

    def _transfer(
        self, wanted: list[int], records: Records, parts: list[list[memoryview]]
    ) -> tuple[list[int], dict[int, int]]:
        """Read some pages. Returns those that do not verify, and how their transfer went."""
        if not wanted:
            return [], {}
        if len(wanted) < len(parts):
            records, parts = records[wanted], [parts[index] for index in wanted]
        layout = self._table.header.layout
        offsets = (layout.data_offset + records["slot"].astype(np.int64) * layout.stride).tolist()
        batch = Batch(offsets, parts, [layout.stride] * len(parts), digest=True)
        self._client.read(batch)
        assert batch.digests is not None
        sealed = self._table.digest.seal(records, [digest or MISSING for digest in batch.digests])
        good = (sealed == records["digest"]).all(axis=1) & (np.array(batch.results) == layout.stride)
        failed = np.flatnonzero(~good).tolist()
        return [wanted[index] for index in failed], {wanted[index]: batch.results[index] for index in failed}

    def _judge(self, page: PageRead, parts: list[memoryview], result: int) -> Verdict:
        """Why a page does not verify."""
        if result < 0:
            return Verdict("io-error", errno=-result)
        if self._refresh:
            self._refresh(page.slot)
        replaced = name_mismatch(self._table.take(as_slots([page.slot]))[0], page)
        if replaced:  # while it was read
            return Verdict(replaced)
        if result < sum(part.nbytes for part in parts):
            return Verdict("short")
        empty = not any(np.frombuffer(part, np.uint8).any() for part in parts)
        return Verdict("hole" if empty else "digest")

    def _count(self, verdicts: list[Verdict], retried: int) -> None:
        missed = [verdict.reason for verdict in verdicts if verdict.reason != "ok"]
        good, counters = len(verdicts) - len(missed), self._counters
        with self._lock:
            counters.reads += good
            counters.read_bytes += good * self._table.header.geometry.payload_bytes
            counters.re_reads += retried
            counters.misses.update(missed)


def find_mismatches(records: Records, batch: Sequence[PageRead]) -> NDArray[np.bool_]:
    """Which slots do not hold the page that is wanted, going by their records."""
    keys = np.frombuffer(b"".join([page.key for page in batch]), "<u8").reshape(-1, 2)
    generations = np.array([page.generation for page in batch], np.uint64)
    differ = (records["key"] != keys).any(axis=1)
    return np.asarray(differ | (records["generation"] != generations) | (records["state"] != COMMITTED))


def name_mismatch(record: np.void, page: PageRead) -> str | None:
    """Why a slot does not hold a page, or None if it does."""
    if record["state"] != COMMITTED:
        return STATE_NAMES[record["state"]]
    if record["key"].tobytes() != page.key:
        return "key"
    return "generation" if record["generation"] != page.generation else None


def check_pages(batch: Sequence[PageRead | PageWrite], payload_bytes: int, slot_count: int) -> list[list[memoryview]]:
    """The memory of each page. Raises ``ValueError`` naming the first entry whose key, slot or parts do not fit."""
    memory = []
    for number, page in enumerate(batch):
        parts = [view_bytes(part) for part in page.parts]
        size = parts[0].nbytes if len(parts) == 1 else sum([part.nbytes for part in parts])
        if size != payload_bytes:
            raise ValueError(f"entry {number}: the parts have {size} bytes; a page of this file has {payload_bytes}")
        if len(page.key) != KEY_BYTES:
            raise ValueError(f"entry {number}: the key has {len(page.key)} bytes; it must have {KEY_BYTES}")
        if not 0 <= page.slot < slot_count:
            raise ValueError(f"entry {number}: slot {page.slot} is not in 0..{slot_count - 1}")
        memory.append(parts)
    return memory
