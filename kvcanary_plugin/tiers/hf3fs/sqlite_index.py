"""The default index: one SQLite database beside the page file, shared by the processes of one host.

WAL with ``synchronous=NORMAL``: a killed process loses nothing that was committed. A machine that goes down may lose
the last transactions; :meth:`SqliteIndex.attach` notices that by the boot id and asks for a rebuild. The database must
lie on a local file system, because WAL needs shared memory and file locks.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from .index import (
    LEASE_S,
    WRITE_DEADLINE_S,
    Entry,
    Held,
    IndexCounts,
    IndexLostError,
    IndexUnavailableError,
    Location,
    Reservation,
    keep_newest,
    lease_once,
    spread,
)
from .sqlite_tables import COMMITTED, RETIRED, SCHEMA_VERSION, WRITING, PageTables

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SqliteIndex:
    """See :class:`~kvcanary_plugin.tiers.hf3fs.index.PageIndex`.

    Args:
        path: the database; created if missing.
        file: hex uuid of the page file it describes.
        lease_s, write_deadline_s: after how long a lease, and a reservation's claim to its key, run out.
        clock_ns: for tests.

    Raises:
        IndexUnavailableError: the database cannot be opened; names the path and what to do.
    """

    def __init__(
        self,
        path: str | Path,
        file: str,
        *,
        lease_s: float = LEASE_S,
        write_deadline_s: float = WRITE_DEADLINE_S,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.path = Path(path)
        self.file = file
        self._lease_ns = int(lease_s * 1e9)
        self._write_deadline_ns = int(write_deadline_s * 1e9)
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_writer = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._tables = PageTables(self.path)
        except (sqlite3.Error, OSError) as error:
            raise IndexUnavailableError(
                f"kvcanary: cannot open the index {str(path)!r}: {error}. It needs a writable folder on a local file "
                'system; set "index" to such a path. It holds nothing that the page file does not: deleting it is safe'
            ) from error

    def reserve(self, keys: Sequence[bytes]) -> list[Reservation | Held | None]:
        """See the protocol."""
        with self._transaction() as now:
            unique = list(dict.fromkeys(keys))
            known = self._tables.select(unique, "state, slot, until")
            outcomes: dict[bytes, Reservation | Held] = {}
            touched, wanted = [], []
            for key in unique:
                state, slot, until = known.get(key, (0, -1, 0))
                if state == COMMITTED:
                    outcomes[key] = Held.COMMITTED
                    touched.append(slot)
                elif state == WRITING and until > now:
                    outcomes[key] = Held.WRITING
                else:
                    wanted.append(key)
                    if state == WRITING:  # its writer is gone or hangs; only that writer can give the slot back
                        self._tables.db.execute("UPDATE page SET key = NULL WHERE slot = ?", (slot,))
            tick = self._tables.touch(touched, ticks=len(wanted) + 1)
            slots = self._tables.allocate(len(wanted), tick, now)
            rows = []
            for token, (key, slot) in enumerate(zip(wanted, slots, strict=False), start=tick + 1):
                outcomes[key] = Reservation(key, slot, token)
                rows.append((slot, key, token, now + self._write_deadline_ns))
            query = "INSERT INTO page (slot, key, state, token, until) VALUES (?, ?, 1, ?, ?)"
            self._tables.db.executemany(query, rows)
        return spread(keys, outcomes)

    def commit(self, written: Sequence[tuple[Reservation, int]]) -> list[bool]:
        """See the protocol."""
        query = """UPDATE page SET state = 2, generation = ?, used = ?, until = 0
                   WHERE slot = ? AND token = ? AND state = 1 AND key = ?"""
        with self._transaction():
            tick = self._tables.touch([])
            rows = [(generation, tick, r.slot, r.token, r.key) for r, generation in written]
            return [self._tables.db.execute(query, row).rowcount == 1 for row in rows]

    def abort(self, reservations: Sequence[Reservation]) -> None:
        """See the protocol."""
        with self._transaction():
            self._tables.free([r.slot for r in reservations if self._tables.owns(r)])

    def retire(self, reservations: Sequence[Reservation]) -> None:
        """See the protocol."""
        with self._transaction():
            self._tables.retire([r.slot for r in reservations if self._tables.owns(r)])

    def lookup(self, keys: Sequence[bytes]) -> list[Location | None]:
        """See the protocol."""
        found: dict[bytes, Location] = {}
        with self._transaction() as now:
            tick = self._tables.touch([])
            rows = []
            columns = "state, slot, generation, readers, lease, until"
            for key, row in self._tables.select(list(dict.fromkeys(keys)), columns).items():
                state, slot, generation, readers, lease, until = row
                if state != COMMITTED:
                    continue
                if readers == 0 or until <= now:
                    readers, lease = 0, lease + 1
                rows.append((readers + 1, lease, now + self._lease_ns, tick, slot))
                found[key] = Location(key, self.file, slot, generation, lease)
            query = "UPDATE page SET readers = ?, lease = ?, until = ?, used = ? WHERE slot = ?"
            self._tables.db.executemany(query, rows)
        return lease_once(keys, found)

    def release(self, locations: Sequence[Location]) -> None:
        """See the protocol."""
        query = "UPDATE page SET readers = readers - 1 WHERE slot = ? AND lease = ? AND readers > 0 AND state = 2"
        with self._transaction():
            self._tables.db.executemany(query, [(place.slot, place.lease) for place in locations if place.lease])

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """See the protocol."""
        with self._transaction():
            rows = self._tables.select(list(dict.fromkeys(keys)), "state, slot")
            committed = {key: slot for key, (state, slot) in rows.items() if state == COMMITTED}
            self._tables.touch(list(committed.values()))
        return [key in committed for key in keys]

    def is_current(self, location: Location) -> bool:
        """See the protocol."""
        with self._transaction():
            return self._tables.holds(location)

    def withdraw(self, locations: Sequence[Location], *, retire: bool) -> None:
        """See the protocol."""
        with self._transaction():
            slots = [place.slot for place in locations if self._tables.holds(place)]
            (self._tables.retire if retire else self._tables.free)(slots)

    def evict(self, keys: Sequence[bytes] | None) -> list[Reservation]:
        """See the protocol."""
        query = "UPDATE page SET state = 1, key = NULL, token = ?, readers = 0, until = ? WHERE slot = ?"
        with self._transaction() as now:
            if keys is None:
                slots = self._tables.list_slots(COMMITTED)
            else:
                rows = self._tables.select(list(dict.fromkeys(keys)), "state, slot").values()
                slots = [slot for state, slot in rows if state == COMMITTED]
            tick = self._tables.touch([], ticks=len(slots) + 1)
            taken = [Reservation(b"", slot, token) for token, slot in enumerate(slots, start=tick + 1)]
            deadline = now + self._write_deadline_ns
            self._tables.db.executemany(query, [(r.token, deadline, r.slot) for r in taken])
        return taken

    def attach(self, slot_count: int, epoch: int) -> bool:
        """See the protocol."""
        # Synced, or a power cut could bring back a database that says it is clean and is not.
        with self._transaction(is_takeover=True):
            get = self._tables.get_meta
            is_ours = (get("file"), get("slot_count"), get("version")) == (self.file, slot_count, SCHEMA_VERSION)
            has_stayed_up = bool(get("is_clean", 0)) or get("boot") == _boot_id()
            if not (is_ours and get("epoch") in (epoch - 1, epoch) and has_stayed_up):
                return False
            self._tables.free(self._tables.list_slots(WRITING))
            self._tables.db.execute("UPDATE page SET readers = 0 WHERE readers > 0")
            self._describe(slot_count, epoch)
        return True

    def rebuild(self, entries: Iterable[Entry], slot_count: int, epoch: int) -> int:
        """See the protocol."""
        rows = [(entry.slot, entry.key, entry.generation) for entry in keep_newest(entries)]
        taken = {slot for slot, _, _ in rows}
        with self._transaction(is_takeover=True):
            db = self._tables.db
            db.execute("DELETE FROM page")
            db.execute("DELETE FROM free")
            db.executemany("INSERT INTO page (slot, key, state, generation) VALUES (?, ?, 2, ?)", rows)
            next_slot = max(taken, default=-1) + 1
            gaps = ((slot,) for slot in range(next_slot) if slot not in taken)
            db.executemany("INSERT INTO free VALUES (?)", gaps)
            self._tables.set_meta("next_slot", next_slot)
            self._describe(slot_count, epoch)
        return len(rows)

    def path_of(self, file: str) -> str | None:
        """See the protocol."""
        return None

    def counts(self) -> IndexCounts:
        """See the protocol."""
        with self._transaction():
            by_state = dict(self._tables.db.execute("SELECT state, count(*) FROM page GROUP BY state").fetchall())
            slots = self._tables.get_meta("slot_count", 0)
        return IndexCounts(by_state.get(COMMITTED, 0), by_state.get(WRITING, 0), by_state.get(RETIRED, 0), slots)

    def close(self) -> None:
        """See the protocol."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            with contextlib.suppress(sqlite3.Error):
                if self._is_writer and self._tables.get_meta("file") == self.file:
                    with self._tables.transaction():
                        self._tables.set_meta("is_clean", 1)
                    with self._tables.synced():
                        self._tables.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._tables.db.close()

    def _describe(self, slot_count: int, epoch: int) -> None:
        self._is_writer = True
        values = {"file": self.file, "slot_count": slot_count, "version": SCHEMA_VERSION, "epoch": epoch}
        for name, value in {**values, "boot": _boot_id(), "is_clean": 0}.items():
            self._tables.set_meta(name, value)

    @contextlib.contextmanager
    def _transaction(self, *, is_takeover: bool = False) -> Iterator[int]:
        """One atomic step; yields the time in ns."""
        with self._lock:
            if self._is_closed:
                raise IndexUnavailableError(f"kvcanary: the index {str(self.path)!r} is closed")
            try:
                sync = self._tables.synced() if is_takeover else contextlib.nullcontext()
                with sync, self._tables.transaction():
                    if not is_takeover and self._tables.get_meta("file") != self.file:
                        raise IndexLostError(f"kvcanary: the index {str(self.path)!r} does not describe this page file")
                    yield self._clock_ns()
            except sqlite3.Error as error:
                raise IndexUnavailableError(f"kvcanary: the index {str(self.path)!r} failed: {error}") from error


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
