"""What is known about the slots of a host pool: which are given out, whose rows they hold, and the records of those.

The records lie on the device, beside those of its own slots: they are only ever copied there and back, in the order of
the stream on which all records change. Which host slots have one is the host's own knowledge, because SGLang gives out
and takes back host slots on the host, on several threads.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..errors import GuardError
from ..kernels import record as r
from .page_rows import PageRows

Ids = npt.NDArray[np.int64]
Records = tuple[torch.Tensor, torch.Tensor]


def ids_of(slots: torch.Tensor) -> Ids:
    """A copy of host slots, int (n,), as numpy.

    Raises:
        GuardError: they are not on the CPU.
    """
    if slots.device.type != "cpu":
        raise GuardError(f"host slots were named on {slots.device}; kvcanary follows those that are named on the CPU")
    return slots.numpy().astype(np.int64, copy=True)


class TakenBack(NamedTuple):
    """Of slots that the host pool takes back: those that a transfer to or from the device uses, those that a storage
    thread reads or writes right now, and those that were not given out."""

    used: Ids
    stored: Ids
    free: Ids


class HostRecords:
    """The slots of one host pool.

    Attributes:
        hot, writers: as in ``ShadowRecords``, one record for each host slot, on the device of the guarded pool.
        since: int64 (slot_count,), the step ahead of which the rows of a slot were copied there; 0 for none.
        rows: the part of the records that storage keeps.
    """

    def __init__(self, slot_count: int, device: torch.device | str) -> None:
        """``slot_count``: slots of the host pool, which are numbered from 0."""
        self.hot = torch.zeros((slot_count, r.RECORD_WORDS), dtype=torch.int64, device=device)
        self.writers = torch.zeros(slot_count, dtype=torch.int64, device=device)
        self.since = np.zeros(slot_count, dtype=np.int64)
        self._is_given = np.zeros(slot_count, dtype=np.bool_)
        self._uses = np.zeros(slot_count, dtype=np.int16)
        self._storage_uses = np.zeros(slot_count, dtype=np.int16)
        self._lives = 0  # of the host pool: it starts another one with each clear
        self.rows = PageRows(slot_count)
        self._lock = threading.Lock()

    @property
    def slot_count(self) -> int:
        """Slots of the host pool."""
        return len(self.since)

    @property
    def resident_bytes(self) -> int:
        """Device bytes kept for the records."""
        return (self.hot.numel() + self.writers.numel()) * 8

    def give(self, ids: Ids) -> None:
        """The host pool gave out slots ``ids``: they hold nothing yet."""
        with self._lock:
            self._is_given[ids], self.since[ids] = True, 0
            self.rows.forget(ids)

    def take_back(self, ids: Ids) -> TakenBack:
        """The host pool takes slots ``ids`` back; their records are gone."""
        with self._lock:
            found = TakenBack(ids[self._uses[ids] > 0], ids[self._storage_uses[ids] > 0], ids[~self._is_given[ids]])
            self._is_given[ids], self.since[ids] = False, 0
            self.rows.forget(ids)
        return found

    def hold(self, ids: Ids) -> Ids:
        """A transfer uses slots ``ids`` until :meth:`let_go`. Returns those that were not given out."""
        with self._lock:
            np.add.at(self._uses, ids, 1)
            return ids[~self._is_given[ids]]

    def let_go(self, ids: Ids) -> None:
        """See :meth:`hold`."""
        with self._lock:
            np.subtract.at(self._uses, ids, 1)

    def hold_for_storage(self, ids: Ids) -> tuple[Ids, int]:
        """A storage thread reads or writes slots ``ids`` until :meth:`let_go_of_storage`, which takes the number.

        Returns:
            Those that were not given out, and that number.
        """
        with self._lock:
            np.add.at(self._storage_uses, ids, 1)
            return ids[~self._is_given[ids]], self._lives

    def let_go_of_storage(self, ids: Ids, life: int) -> None:
        """See :meth:`hold_for_storage`."""
        with self._lock:
            if life == self._lives:
                np.subtract.at(self._storage_uses, ids, 1)

    def slots_in_storage(self) -> Ids:
        """Slots that storage threads read or write now."""
        return np.flatnonzero(self._storage_uses)

    def note_filled(self, ids: Ids, step: int) -> None:
        """Rows with records are on their way to slots ``ids``; ``step`` is the next one."""
        with self._lock:
            given = ids[self._is_given[ids]]
            self.since[ids], self.since[given] = 0, step
            self.rows.expect(given, step)

    def clear(self) -> None:
        """The host pool holds every slot again."""
        with self._lock:
            self._is_given[:], self._uses[:], self._storage_uses[:], self.since[:] = False, 0, 0, 0
            self._lives += 1
            self.rows.forget()

    def store(self, slots: torch.Tensor, records: Records) -> None:
        """Keep ``records`` for host slots, int64 (n,) on the device, in stream order."""
        self.hot.index_copy_(0, slots, records[0])
        self.writers.index_copy_(0, slots, records[1])

    def copy(self, slots: torch.Tensor) -> Records:
        """Records and writers of host slots, int64 (n,) on the device, in stream order."""
        return self.hot.index_select(0, slots), self.writers.index_select(0, slots)
