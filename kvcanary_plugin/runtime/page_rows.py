"""The part of the records of host slots that storage keeps, in host memory, where storage threads can have it.

On its way out a record is copied from the device a moment after the rows were, in stream order; who stores the page
waits for it. On its way in it waits here until the slot is loaded.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from ..kernels import record as r
from ..kernels.mixing import mix
from ..pool_patcher.sources import SourceTable
from ..tiers.page_records import IDENTITY, ROW_WORDS, Ids, Rows

PATIENCE_S = 1.0  # for the next forward or idle pass, which copies the records; without it a page is stored without
_POLL_S = 0.002


class _Arrival(NamedTuple):
    slots: Ids
    step: int
    rows: torch.Tensor  # int64 (n, ROW_WORDS) in host memory
    is_there: Any  # event behind the copy, None if it is over


class PageRows:
    """Rows for each slot of one host pool. Safe to call from several threads."""

    def __init__(self, slot_count: int) -> None:
        self._rows: Rows = np.zeros((slot_count, ROW_WORDS), np.int64)
        # Ahead of which step a slot was filled from the device, and of which filling the row is; 0 for another.
        self._due: Ids = np.zeros(slot_count, np.int64)
        self._there: Ids = np.zeros(slot_count, np.int64)
        self._arriving: deque[_Arrival] = deque()
        self._lock = threading.Lock()

    def expect(self, slots: Ids, step: int) -> None:
        """``slots`` are being filled from the device ahead of ``step``; :meth:`bring` follows."""
        with self._lock:
            self._rows[slots], self._due[slots], self._there[slots] = 0, step, 0

    def bring(self, slots: Ids, step: int, records: torch.Tensor) -> None:
        """Copy what matters of ``records``, int64 (n, RECORD_WORDS) on the device, of the rows that were copied to
        ``slots`` ahead of ``step``. In stream order; does not wait.
        """
        rows, is_there = records[:, [r.DIGEST, r.LOCATOR, r.IDENTITY]], None
        if rows.device.type != "cpu":
            rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows, non_blocking=True)
            is_there = torch.get_device_module(records.device).Event()
            is_there.record()
        with self._lock:
            self._take_arrived()  # storage may never ask
            self._arriving.append(_Arrival(slots, step, rows, is_there))

    def collect(self, slots: Ids) -> Rows:
        """Rows of ``slots``, zeros where there is none. Waits a moment for those that were filled from the device."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with self._lock:
                self._take_arrived()
                is_known = self._there[slots] == self._due[slots]
                if is_known.all() or time.monotonic() > deadline:
                    return np.where(is_known[:, None], self._rows[slots], 0)
            time.sleep(_POLL_S)

    def supply(self, slots: Ids, rows: Rows) -> None:
        """``slots`` were filled from storage."""
        with self._lock:
            self._rows[slots], self._due[slots], self._there[slots] = rows, 0, 0

    def forget(self, slots: Ids | None = None) -> None:
        """What is in ``slots``, None for all, is not known any more."""
        with self._lock:
            if slots is None:
                self._arriving.clear()
                slots = np.arange(len(self._rows))
            self._rows[slots], self._due[slots], self._there[slots] = 0, 0, 0

    def _take_arrived(self) -> None:
        while self._arriving and (self._arriving[0].is_there is None or self._arriving[0].is_there.query()):
            arrival = self._arriving.popleft()
            rows = arrival.rows.numpy()
            is_wanted = self._due[arrival.slots] == arrival.step  # else the slot has been given to somebody else since
            slots, rows = arrival.slots[is_wanted], rows[is_wanted]
            is_live = (rows[:, IDENTITY] & r.LIVE_BIT) != 0
            self._rows[slots], self._there[slots] = np.where(is_live[:, None], rows, 0), arrival.step


def fingerprint_of(table: SourceTable) -> bytes:
    """16 bytes that agree where digests of the same bytes do: sources in their order, and the arithmetic itself."""
    shape = [
        (*name, source.word_count, source.read_bytes) for name, source in zip(table.names, table.sources, strict=True)
    ]
    digest = xxhash.xxh3_128(repr(shape).encode())
    sample = mix(torch.arange(-8, 8, dtype=torch.int64) * 0x0123456789ABCDE)
    for part in (table.keys.cpu(), table.weights.cpu(), sample):
        digest.update(part.contiguous().numpy().tobytes())
    return digest.digest()


def is_row_known(rows: Rows) -> npt.NDArray[np.bool_]:
    """Which rows say something, bool (n,)."""
    return np.asarray(rows[:, IDENTITY] != 0)
