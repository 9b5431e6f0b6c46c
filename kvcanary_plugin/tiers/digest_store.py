"""Digests of pages that another storage backend keeps, beside it: in SQLite on this host or in a Redis for several.

A page may have several digests: recomputing the same tokens in another batch gives slightly other bytes, and a backend
is free to keep the first version or the last. Any version that was stored under the key is right; anything else is not.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import ConfigError, KvcanaryError
from .hf3fs.options import redis_password
from .hf3fs.sqlite_tables import make_private

MAX_VERSIONS = 64
MAX_ROWS = 2_000_000
EXPIRY_S = 14 * 24 * 3600
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class DigestsUnavailableError(KvcanaryError):
    """The digests cannot be had now; every page is then a miss."""


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a page that was stored.

    Attributes:
        page: 16 bytes that name the page, without its scope.
        scope: 16 bytes that stand for LoRA adapter, salt and weights.
        digest: 16 bytes over the page.
        is_certain: nobody else can have stored other bytes under this key, so anything else that comes back is damage.
    """

    page: bytes
    scope: bytes
    digest: bytes
    is_certain: bool


class DigestStore(Protocol):
    """Safe to call from several threads. Raises :class:`DigestsUnavailableError`."""

    def add(self, versions: Sequence[Version]) -> None:
        """Remember versions; one that is known already becomes certain if it is said to be."""

    def find(self, pages: Iterable[bytes]) -> dict[bytes, list[Version]]:
        """All versions of some pages."""

    def close(self) -> None:
        """Idempotent."""


class SqliteDigests:
    """Shared by the processes of a host. The oldest rows go once there are too many: their pages become misses.

    Raises:
        ConfigError: the database cannot be opened.
    """

    def __init__(self, path: str | Path, *, max_rows: int = MAX_ROWS) -> None:
        self.path = Path(path)
        self._max_rows = max_rows
        self._added = 0
        self._lock = threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            make_private(self.path)
            self._db = self._open()
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"kvcanary: cannot keep digests in {str(path)!r}: {error}; give another path") from error

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=5, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("CREATE TABLE IF NOT EXISTS boot (id TEXT)")
            db.execute(
                "CREATE TABLE IF NOT EXISTS version (number INTEGER PRIMARY KEY, page BLOB, scope BLOB, digest BLOB, "
                "is_certain INTEGER, UNIQUE (page, scope, digest))"
            )
            db.execute("BEGIN IMMEDIATE")
            # After a power cut the newest rows may be missing, and what is stored may be newer than what is known.
            if db.execute("SELECT id FROM boot").fetchall() != [(_boot_id(),)]:
                db.execute("UPDATE version SET is_certain = 0")
                db.execute("DELETE FROM boot")
                db.execute("INSERT INTO boot VALUES (?)", (_boot_id(),))
            db.execute("COMMIT")
        except sqlite3.Error:
            db.close()
            raise
        return db

    def add(self, versions: Sequence[Version]) -> None:
        """See the protocol."""
        rows = [(v.page, v.scope, v.digest, int(v.is_certain)) for v in versions]
        with self._lock, self._transaction("IMMEDIATE"):
            self._db.executemany(
                "INSERT INTO version (page, scope, digest, is_certain) VALUES (?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET is_certain = max(is_certain, excluded.is_certain)",
                rows,
            )
            self._added += len(rows)
            if self._added > self._max_rows // 16:
                self._added = 0
                (last,) = self._db.execute("SELECT max(number) FROM version").fetchone()
                self._db.execute("DELETE FROM version WHERE number <= ?", (last - self._max_rows,))

    def find(self, pages: Iterable[bytes]) -> dict[bytes, list[Version]]:
        """See the protocol."""
        found: dict[bytes, list[Version]] = {}
        query = "SELECT page, scope, digest, is_certain FROM version WHERE page = ?"
        with self._lock, self._transaction("DEFERRED"):
            for page in dict.fromkeys(pages):
                found[page] = [Version(p, s, d, bool(c)) for p, s, d, c in self._db.execute(query, (page,))]
        return found

    def close(self) -> None:
        """See the protocol."""
        with self._lock:
            self._db.close()

    @contextlib.contextmanager
    def _transaction(self, kind: str) -> Iterator[None]:
        try:
            self._db.execute(f"BEGIN {kind}")
            yield
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise DigestsUnavailableError(f"kvcanary: the digests in {str(self.path)!r} failed: {error}") from error


class RedisDigests:
    """Shared by all hosts that use one backend.

    Raises:
        ConfigError: the package or the server is not there.
    """

    def __init__(self, url: str, *, timeout_s: float = 2.0) -> None:
        try:
            import redis
        except ImportError as error:
            raise ConfigError('kvcanary: digests at redis:// need the package "redis": pip install redis') from error
        self._errors = (redis.RedisError, OSError)
        try:
            self._redis: Any = redis.Redis.from_url(
                url, password=redis_password(), socket_timeout=timeout_s, socket_connect_timeout=timeout_s
            )
            self._redis.ping()
        except (redis.RedisError, OSError, ValueError) as error:
            address = url.rpartition("@")[2]
            raise ConfigError(
                f"kvcanary: no Redis answers at {address} for the digests ({type(error).__name__}); start one, or "
                'correct "kvcanary_digests"'
            ) from error

    def add(self, versions: Sequence[Version]) -> None:
        """See the protocol."""
        try:
            with self._redis.pipeline(transaction=False) as pipe:
                for v in versions:
                    name = b"kvcanary:digests:" + v.page
                    if v.is_certain:
                        pipe.hset(name, v.scope + v.digest, 1)
                    else:
                        pipe.hsetnx(name, v.scope + v.digest, 0)
                    pipe.expire(name, EXPIRY_S)
                pipe.execute()
        except self._errors as error:
            raise DigestsUnavailableError(f"kvcanary: the Redis with the digests failed: {error}") from error

    def find(self, pages: Iterable[bytes]) -> dict[bytes, list[Version]]:
        """See the protocol."""
        unique = list(dict.fromkeys(pages))
        try:
            with self._redis.pipeline(transaction=False) as pipe:
                for page in unique:
                    pipe.hgetall(b"kvcanary:digests:" + page)
                replies = pipe.execute()
        except self._errors as error:
            raise DigestsUnavailableError(f"kvcanary: the Redis with the digests failed: {error}") from error
        return {
            page: [Version(page, name[:16], name[16:], value == b"1") for name, value in reply.items()]
            for page, reply in zip(unique, replies, strict=True)
        }

    def close(self) -> None:
        """See the protocol."""
        self._redis.close()


def open_digests(where: str) -> DigestStore:
    """By address: ``redis://...``, else a path. Raises ``ConfigError``."""
    return RedisDigests(where) if where.startswith(("redis://", "rediss://", "unix://")) else SqliteDigests(where)


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
