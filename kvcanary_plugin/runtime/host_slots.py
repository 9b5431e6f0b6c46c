"""What the guard tells storage code of host slots, and learns from it: see ``tiers.page_records.HostSlots``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from ..tiers.page_records import ROW_WORDS, Ids, Rows
from .host_records import HostRecords


class FollowedSlots:
    """The slots of one host pool, for as long as they are followed: afterwards storage gets on without."""

    def __init__(
        self,
        host: HostRecords,
        fingerprint: bytes,
        is_followed: Callable[[], bool],
        report: Callable[[str, Ids], None],
    ) -> None:
        """``report`` takes a kind of violation and the host slots that show it."""
        self.fingerprint = fingerprint
        self._host = host
        self._is_followed = is_followed
        self._report = report

    @contextlib.contextmanager
    def in_use(self, slots: Ids) -> Iterator[None]:
        """Storage reads or writes slots (n,) meanwhile."""
        if not self._is_followed():
            yield
            return
        free, life = self._host.hold_for_storage(slots)
        self._report("host_slot_free", free)
        try:
            yield
        finally:
            self._host.let_go_of_storage(slots, life)

    def collect(self, slots: Ids) -> Rows:
        """What the device made of the rows in slots (n,). Waits for it a moment if it was just copied."""
        unknown: Rows = np.zeros((len(slots), ROW_WORDS), np.int64)
        if not self._is_followed():
            return unknown
        rows = self._host.rows.collect(slots)
        return rows if self._is_followed() else unknown

    def supply(self, slots: Ids, rows: Rows) -> None:
        """Slots (n,) were filled from storage, which has ``rows`` of them."""
        if self._is_followed():
            self._host.rows.supply(slots, rows)
