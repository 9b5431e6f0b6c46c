"""The tables of :class:`~kvcanary_plugin.tiers.hf3fs.sqlite_index.SqliteIndex`, and the statements on them."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .index import Location, Reservation

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 5.0
WRITING, COMMITTED, RETIRED = 1, 2, 3
_MAX_VARIABLES = 500

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS page (
    slot INTEGER PRIMARY KEY,
    key BLOB,               -- NULL: retired, or a reservation that has lost its key
    state INTEGER NOT NULL,
    generation INTEGER NOT NULL DEFAULT 0,
    token INTEGER NOT NULL DEFAULT 0,    -- of the reservation
    used INTEGER NOT NULL DEFAULT 0,     -- tick
    readers INTEGER NOT NULL DEFAULT 0,
    lease INTEGER NOT NULL DEFAULT 0,    -- counts up each time a first reader comes
    until INTEGER NOT NULL DEFAULT 0     -- ns; end of the lease, or of the claim of a writer to its key
);
CREATE UNIQUE INDEX IF NOT EXISTS page_key ON page (key) WHERE key IS NOT NULL;
CREATE INDEX IF NOT EXISTS page_used ON page (used) WHERE state = 2;
CREATE TABLE IF NOT EXISTS free (slot INTEGER PRIMARY KEY);
"""


class PageTables:
    """Three tables: ``page``, one row for each slot that is not free; ``free``, slots given back; ``meta``, by name.

    Slots from ``next_slot`` on were never used and have no row at all. Not thread-safe.

    Raises:
        sqlite3.Error: from every method.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.db = _open(path)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:  # damaged: all it holds can be had from the page file again
            for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
                name.unlink(missing_ok=True)
            self.db = _open(path)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, alone."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self.db.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def synced(self) -> Iterator[None]:
        """Transactions inside of this survive a power cut."""
        self.db.execute("PRAGMA synchronous = FULL")
        try:
            yield
        finally:
            self.db.execute("PRAGMA synchronous = NORMAL")

    def select(self, keys: Sequence[bytes], columns: str) -> dict[bytes, tuple[Any, ...]]:
        """Rows by key."""
        rows: dict[bytes, tuple[Any, ...]] = {}
        for start in range(0, len(keys), _MAX_VARIABLES):
            some = keys[start : start + _MAX_VARIABLES]
            query = f"SELECT key, {columns} FROM page WHERE key IN ({','.join('?' * len(some))})"
            rows.update((row[0], row[1:]) for row in self.db.execute(query, some))
        return rows

    def allocate(self, count: int, tick: int, now: int) -> list[int]:
        """Up to ``count`` slots: returned ones, then never used ones, then those of pages last used before ``tick``."""
        slots = [slot for (slot,) in self.db.execute("SELECT slot FROM free LIMIT ?", (count,))]
        self.db.executemany("DELETE FROM free WHERE slot = ?", [(slot,) for slot in slots])
        next_slot = self.get_meta("next_slot", 0)
        fresh = min(count - len(slots), self.get_meta("slot_count", 0) - next_slot)
        if fresh > 0:
            slots += range(next_slot, next_slot + fresh)
            self.set_meta("next_slot", next_slot + fresh)
        if len(slots) < count:
            query = """SELECT slot FROM page WHERE state = 2 AND used < ? AND (readers = 0 OR until <= ?)
                       ORDER BY used LIMIT ?"""
            evicted = [slot for (slot,) in self.db.execute(query, (tick, now, count - len(slots)))]
            self.db.executemany("DELETE FROM page WHERE slot = ?", [(slot,) for slot in evicted])
            slots += evicted
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Whatever they hold is forgotten."""
        rows = [(slot,) for slot in slots]
        self.db.executemany("DELETE FROM page WHERE slot = ?", rows)
        self.db.executemany("INSERT OR IGNORE INTO free VALUES (?)", rows)

    def retire(self, slots: Sequence[int]) -> None:
        """Whatever they hold is forgotten, and they are not allocated again."""
        query = "UPDATE page SET state = 3, key = NULL, readers = 0 WHERE slot = ?"
        self.db.executemany(query, [(slot,) for slot in slots])

    def touch(self, slots: Sequence[int], *, ticks: int = 1) -> int:
        """Advance the tick, which orders uses and numbers reservations; the first new one becomes that of ``slots``."""
        last: int = self.get_meta("tick", 0)
        self.set_meta("tick", last + ticks)
        self.db.executemany("UPDATE page SET used = ? WHERE slot = ?", [(last + 1, slot) for slot in slots])
        return last + 1

    def owns(self, r: Reservation) -> bool:
        """Whether the reservation still has its slot."""
        query = "SELECT 1 FROM page WHERE slot = ? AND token = ? AND state = 1"
        return self.db.execute(query, (r.slot, r.token)).fetchone() is not None

    def holds(self, place: Location) -> bool:
        """Whether the page is still there."""
        query = "SELECT 1 FROM page WHERE slot = ? AND key = ? AND generation = ? AND state = 2"
        return self.db.execute(query, (place.slot, place.key, place.generation)).fetchone() is not None

    def list_slots(self, state: int) -> list[int]:
        """All slots in that state."""
        return [slot for (slot,) in self.db.execute("SELECT slot FROM page WHERE state = ?", (state,))]

    def get_meta(self, name: str, default: Any = None) -> Any:
        """A named value."""
        row = self.db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return default if row is None else row[0]

    def set_meta(self, name: str, value: Any) -> None:
        """Store a named value."""
        self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))


def make_private(path: Path) -> None:
    """Make an empty database that only its owner can read. SQLite gives the files beside it the same permissions.

    Raises:
        OSError: it cannot be made, or a symbolic link lies there.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600))


def _open(path: Path) -> sqlite3.Connection:
    make_private(path)
    db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.executescript(_SCHEMA)
    except sqlite3.Error:
        db.close()
        raise
    return db
