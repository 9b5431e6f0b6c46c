"""A page store under SGLang's keys: keys made unique, findings reported, damaged pages wiped."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import scope
from ..finding import TierViolation, report
from .client import view_bytes
from .geometry import Geometry
from .identity import make_page_key
from .opening_store import open_store
from .options import StorageOptions
from .page import Verdict
from .store import Damage, PageStore

logger = logging.getLogger("kvcanary")

RETRY_AFTER_S = 1.0


class NamedStore:
    """A page store under SGLang's keys. Findings are reported under the name of the pool.

    A reader, whose file another rank makes, opens it once it is there.

    Raises:
        ConfigError: at once, if the store of a writer cannot be used.
    """

    def __init__(
        self, options: StorageOptions, geometry: Geometry, name: str, capacity_bytes: int, rank: int, is_reader: bool
    ) -> None:
        self.name = name
        self.geometry = geometry
        self._rank = rank
        self._local = threading.local()  # keys of the call that runs, to name what is found
        self._lock = threading.Lock()
        self._retry_at = 0.0
        self._is_closed = False

        def open_now() -> PageStore | None:
            return open_store(
                options, geometry, name, capacity_bytes, read_only=is_reader, on_damage=self._report_damage
            )

        self._open: Callable[[], PageStore | None] = open_now
        self._is_reader = is_reader
        self._store = None if is_reader else open_now()

    @property
    def counts(self) -> Counter[str]:
        """Pages by outcome."""
        return Counter() if self._store is None else self._store.counts

    @property
    def slot_count(self) -> int | None:
        """Pages that fit; None for a reader that has not found its file yet."""
        return None if self._store is None else self._store.file.slot_count

    def get(self, keys: Sequence[str], pages: Sequence[Sequence[Any]]) -> list[Verdict]:
        """Fetch pages into their pieces. A page that was read and is not right is zeroed: it must not be of use."""
        store = self._find()
        if store is None:
            return [Verdict("absent")] * len(keys)
        self._local.keys = keys
        verdicts = store.get(self.name_pages(keys), pages)
        for verdict, pieces in zip(verdicts, pages, strict=True):
            if not verdict.ok and verdict.reason != "absent":
                for piece in pieces:
                    np.frombuffer(view_bytes(piece), np.uint8)[:] = 0
        return verdicts

    def set(self, keys: Sequence[str], pages: Sequence[Sequence[Any]], records: Sequence[bytes] = ()) -> list[bool]:
        """Store pages given by their pieces, each with its records if there are any."""
        store = self._find()
        return [False] * len(keys) if store is None else store.set(self.name_pages(keys), pages, records)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which pages are stored."""
        store = self._find()
        return [False] * len(keys) if store is None else store.exists(self.name_pages(keys))

    def clear(self) -> None:
        """Forget the pages of this process's file."""
        if self._store is not None:
            self._store.clear()

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._is_closed = True
        if self._store is not None:
            self._store.close()

    def name_pages(self, keys: Sequence[str]) -> list[bytes]:
        """The keys under which pages are stored, in the scope of the calling thread."""
        now = scope.current()
        return [make_page_key(self.geometry.digest, now, key) for key in keys]

    def _find(self) -> PageStore | None:
        if self._store is None and self._is_reader and time.monotonic() >= self._retry_at:
            with self._lock:
                if self._store is None and not self._is_closed:
                    self._retry_at = time.monotonic() + RETRY_AFTER_S
                    self._store = self._open()
        return self._store

    def _report_damage(self, damages: list[Damage]) -> None:
        keys: Sequence[str] = self._local.keys
        report(
            [
                TierViolation(
                    kind=damage.reason,
                    pool=self.name,
                    rank=self._rank,
                    page_key=keys[damage.number],
                    place=f"file {damage.place.file} slot {damage.place.slot} generation {damage.place.generation}",
                )
                for damage in damages
            ]
        )
