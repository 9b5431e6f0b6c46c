"""All trailer records of a page file, in memory and on their way to the file."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from .checksum import PageDigest
from .client import BLOCK_BYTES, Batch, Client
from .header import Header
from .layout import SLOTS_PER_SEGMENT
from .trailer import COMMITTED, RECORD, WRITING, Trailers, encode_block, geometry_word, parse_trailers, stamp_crcs

LOCKS = 64
MAX_PIECE_BYTES = 1 << 20  # of one request
SCANNED_SEGMENTS = 8192  # at a time, 64 MiB of blocks
Slots = NDArray[np.int64]
Records = NDArray[np.void]


class TrailerTable:
    """64 bytes a slot in memory. One lock is held while records change or are copied, and one lock a segment while its
    block is written, since its two copies are written in turn.
    """

    def __init__(self, header: Header, client: Client) -> None:
        self._client, self._layout = client, header.layout
        self._lock = threading.Lock()
        self._segment_locks = [threading.Lock() for _ in range(LOCKS)]
        self._use(header)
        count = self._layout.segment_count
        pieces = [
            read_trailers(client, header, first, min(SCANNED_SEGMENTS, count - first))
            for first in range(0, count, SCANNED_SEGMENTS)
        ]
        self._records = np.concatenate([piece.records for piece in pieces])
        self._sequence = np.concatenate([piece.sequence for piece in pieces])
        self._current = np.concatenate([piece.current for piece in pieces])
        self.faults = [fault for piece in pieces for fault in piece.faults]
        self._damaged = [segment for piece in pieces for segment in piece.damaged]
        # Whether the file may say of a slot that it is committed: overwriting it needs another word there first.
        self._stored = np.asarray(self._records["state"] == COMMITTED, np.bool_)

    def _use(self, header: Header) -> None:
        self.header, self.digest = header, PageDigest(header)

    def adopt(self, header: Header) -> None:
        """Begin another life of the file: every record of the one before is void."""
        with ExitStack() as held:
            for lock in (*self._segment_locks, self._lock):
                held.enter_context(lock)
            self._use(header)
            self._records[:] = np.zeros((), RECORD)
            self._stored[:] = False

    def refresh(self, segment: int) -> None:
        """Read the blocks of one segment again, for a reader that somebody else writes for."""
        trailers = read_trailers(self._client, self.header, segment, 1)
        first = segment * SLOTS_PER_SEGMENT
        with self._lock:
            self._records[first : first + SLOTS_PER_SEGMENT] = trailers.records

    def take(self, slots: Slots) -> Records:
        """A copy of the records of some slots."""
        with self._lock:
            return self._records[slots]

    def take_all(self) -> Records:
        """A copy of all records."""
        with self._lock:
            return self._records[: self._layout.slot_count].copy()

    def make(self, slots: Slots, keys: list[bytes], generations: range, records_bytes: list[int]) -> Records:
        """New records of some slots, without digest, state and CRC."""
        records = np.zeros(len(slots), RECORD)
        records["key"] = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2)
        records["generation"], records["slot"], records["records_bytes"] = generations, slots, records_bytes
        records["geometry"], records["salt"] = geometry_word(self.header), self.header.salt
        return records

    def put(self, slots: Slots, records: Records, state: int) -> None:
        """Replace the records of some slots, in memory. Records of an earlier life are left out."""
        records["state"] = state
        stamp_crcs(records)
        with self._lock:
            current = records["salt"] == self.header.salt
            self._records[slots[current]] = records[current]

    def mark(self, slots: Slots) -> None:
        """Say of slots that they are being overwritten, in memory, whatever their records say besides."""
        with self._lock:
            self._records["state"][slots] = WRITING

    def free(self, slots: Slots) -> None:
        """Make slots free, in memory."""
        with self._lock:
            self._records[slots] = np.zeros((), RECORD)

    def may_be_stored(self, slots: Slots) -> NDArray[np.bool_]:
        """Of which slots the file may say that they are committed."""
        return np.asarray(self._stored[slots], np.bool_)

    def store(self, slots: Slots) -> NDArray[np.bool_]:
        """Write the blocks with the records of some slots to the file. Returns for each slot whether it got there."""
        segments = sorted(set((slots // SLOTS_PER_SEGMENT).tolist()))
        with ExitStack() as held:
            for lock in sorted({segment % LOCKS for segment in segments}):
                held.enter_context(self._segment_locks[lock])
            offsets, blocks, states = [], [], []
            for segment in segments:
                copy = 1 - int(self._current[segment])
                self._sequence[segment] += 1
                span = slice(segment * SLOTS_PER_SEGMENT, (segment + 1) * SLOTS_PER_SEGMENT)
                with self._lock:
                    records = self._records[span].tobytes()
                    states.append(self._records["state"][span] == COMMITTED)
                    self._stored[span] |= states[-1]  # even a write that fails may arrive
                block = encode_block(self.header, segment, copy, int(self._sequence[segment]), records)
                offsets.append(self._layout.table_offsets[copy] + segment * BLOCK_BYTES)
                blocks.append((memoryview(block),))
            batch = Batch(offsets, blocks, [BLOCK_BYTES] * len(blocks))
            self._client.write(batch)
            lost = []
            for segment, result, committed in zip(segments, batch.results, states, strict=True):
                if result == BLOCK_BYTES:
                    self._current[segment] ^= 1
                    self._stored[segment * SLOTS_PER_SEGMENT : (segment + 1) * SLOTS_PER_SEGMENT] = committed
                else:
                    lost.append(segment)
        return ~np.isin(slots // SLOTS_PER_SEGMENT, lost) if lost else np.ones(len(slots), np.bool_)

    def rewrite_damaged(self) -> None:
        """Write both copies of every block that was found damaged."""
        slots = as_slots(segment * SLOTS_PER_SEGMENT for segment in self._damaged)
        for _ in range(2):
            self.store(slots)


def read_trailers(client: Client, header: Header, first: int, count: int) -> Trailers:
    """Read and merge both copies of ``count`` blocks. What cannot be read counts as damaged."""
    piece = max(1, min(client.bytes_per_page, MAX_PIECE_BYTES) // BLOCK_BYTES) * BLOCK_BYTES
    tables = bytearray(count * BLOCK_BYTES), bytearray(count * BLOCK_BYTES)
    offsets, parts = [], []
    for table, start in zip(tables, header.layout.table_offsets, strict=True):
        for at in range(0, len(table), piece):
            offsets.append(start + first * BLOCK_BYTES + at)
            parts.append((memoryview(table)[at : at + piece],))
    batch = Batch(offsets, parts, [part.nbytes for (part,) in parts])
    client.read(batch)
    for (part,), size, result in zip(parts, batch.sizes, batch.results, strict=True):
        if result != size:
            part[:] = b"\xff" * size
    return parse_trailers(header, tables, first)


def as_slots(slots: Iterable[int]) -> Slots:
    """Slots as an array of indices."""
    return np.array(list(slots), np.int64)
