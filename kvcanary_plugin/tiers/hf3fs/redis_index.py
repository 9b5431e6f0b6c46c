"""The index for several hosts on one 3FS namespace: one Redis, a page file for each writer, everybody reads all files.

Needs the package ``redis`` (``pip install redis``) and a Redis 5 or newer. Nothing in Redis has to be durable: a server
that comes back empty, or with an old snapshot, costs a rebuild or some misses.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from ...errors import ConfigError
from . import redis_file_scripts as on_files
from . import redis_page_scripts as on_pages
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
)
from .options import redis_password
from .redis_layout import LOST

TIMEOUT_S = 2.0
RETRY_AFTER_S = 1.0
_SCRIPTS = {
    on_pages: ("reserve", "commit", "abort", "lookup", "release", "exists"),
    on_files: ("withdraw", "evict", "attach", "forget", "adopt"),
}
_CHUNK = 1000  # pages a script, so that no step holds the server up for long


class RedisIndex:
    """See :class:`~kvcanary_plugin.tiers.hf3fs.index.PageIndex`.

    Args:
        url: ``redis://[user:password@]host:port/db``, ``rediss://`` or ``unix://``.
        file: hex uuid of the page file that this process writes, or that of any file for a process that only reads.
        path: where that file is, as other hosts see it.
        namespace: hosts with the same one share their pages.
        lease_s, write_deadline_s: after how long a lease, and a reservation's claim to its key, run out.

    Raises:
        ConfigError: the package or the server is not there; names the address, without its password, and what to do.
    """

    def __init__(
        self,
        url: str,
        file: str,
        *,
        path: str = "",
        namespace: str = "default",
        lease_s: float = LEASE_S,
        write_deadline_s: float = WRITE_DEADLINE_S,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            import redis
        except ImportError as error:
            raise ConfigError(
                'kvcanary: an index at redis:// needs the package "redis": pip install redis (or kvcanary[redis]), '
                'or set "index" to a path for an index of this host alone'
            ) from error
        self.file = file
        self.address = _hide_password(url)
        self._path = path
        self._prefix = f"kvcanary:{{{namespace}}}"
        self._lease_ms = round(lease_s * 1000)
        self._deadline_ms = round(write_deadline_s * 1000)
        self._clock = clock
        self._down_until = 0.0
        self._epoch = ""
        self._lock = threading.Lock()
        self._errors = (redis.ConnectionError, redis.TimeoutError, OSError)
        self._response_error = redis.ResponseError
        self._is_closed = False
        try:
            self._redis: Any = redis.Redis.from_url(
                url, password=redis_password(), socket_timeout=timeout_s, socket_connect_timeout=timeout_s
            )
            self._redis.ping()
        except (redis.RedisError, OSError, ValueError) as error:
            raise ConfigError(
                f"kvcanary: no Redis answers at {self.address} ({type(error).__name__}). Start one, or correct "
                '"index"; for a single host leave "index" out: the default needs no server'
            ) from error
        self._scripts = {
            name: self._redis.register_script(getattr(module, name.upper()))
            for module, names in _SCRIPTS.items()
            for name in names
        }

    def reserve(self, keys: Sequence[bytes]) -> list[Reservation | Held | None]:
        """See the protocol."""
        if not keys:
            return []
        arguments = [self.file, self._epoch, self._deadline_ms, 10 * self._deadline_ms, *keys]
        outcomes: list[Reservation | Held | None] = []
        for key, reply in zip(keys, self._run("reserve", arguments), strict=True):
            if reply is None:
                outcomes.append(None)
            elif reply in (b"C", b"W"):
                outcomes.append(Held.COMMITTED if reply == b"C" else Held.WRITING)
            else:
                slot, token = reply.split(b"|")
                outcomes.append(Reservation(key, int(slot), int(token)))
        return outcomes

    def commit(self, written: Sequence[tuple[Reservation, int]]) -> list[bool]:
        """See the protocol."""
        if not written:
            return []
        arguments: list[Any] = [self.file, self._epoch]
        for r, generation in written:
            arguments += (r.slot, r.token, r.key, generation)
        return [reply == 1 for reply in self._run("commit", arguments)]

    def abort(self, reservations: Sequence[Reservation]) -> None:
        """See the protocol."""
        self._give_back(reservations, 0)

    def retire(self, reservations: Sequence[Reservation]) -> None:
        """See the protocol."""
        self._give_back(reservations, 1)

    def _give_back(self, reservations: Sequence[Reservation], retire: int) -> None:
        if reservations:
            pairs = [value for r in reservations for value in (r.slot, r.token)]
            self._run("abort", [self.file, self._epoch, retire, *pairs])

    def lookup(self, keys: Sequence[bytes]) -> list[Location | None]:
        """See the protocol."""
        unique = list(dict.fromkeys(keys))
        if not unique:
            return []
        found: dict[bytes, Location] = {}
        for key, reply in zip(unique, self._run("lookup", [self._lease_ms, *unique]), strict=True):
            if reply is not None:
                file, slot, generation, lease = reply
                found[key] = Location(key, file.decode(), int(slot), int(generation), int(lease))
        return lease_once(keys, found)

    def release(self, locations: Sequence[Location]) -> None:
        """See the protocol."""
        triples = [value for place in locations if place.lease for value in (place.file, place.slot, place.lease)]
        if triples:
            self._run("release", triples)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """See the protocol."""
        return [reply == 1 for reply in self._run("exists", list(keys))] if keys else []

    def is_current(self, location: Location) -> bool:
        """See the protocol."""
        return bool(self._run("withdraw", ["", *_describe(location)]))

    def withdraw(self, locations: Sequence[Location], *, retire: bool) -> None:
        """See the protocol."""
        if locations:
            self._run("withdraw", [int(retire), *(value for place in locations for value in _describe(place))])

    def evict(self, keys: Sequence[bytes] | None) -> list[Reservation]:
        """See the protocol."""
        which = ["all"] if keys is None else ["keys", *keys]
        replies = self._run("evict", [self.file, self._epoch, self._deadline_ms, *which])
        return [Reservation(b"", int(slot), int(token)) for slot, token in replies]

    def attach(self, slot_count: int, epoch: int) -> bool:
        """See the protocol."""
        self._epoch = str(epoch)
        for file, path in self._call(lambda: self._redis.hgetall(f"{self._prefix}:files")).items():
            if os.fsdecode(path) == self._path and os.fsdecode(file) != self.file:
                self._forget(os.fsdecode(file))  # what lay at this path before; its pages are gone
        return bool(self._run("attach", [self.file, epoch, slot_count, self._path]))

    def rebuild(self, entries: Iterable[Entry], slot_count: int, epoch: int) -> int:
        """See the protocol."""
        self._epoch = str(epoch)
        self._forget(self.file)
        pages = keep_newest(entries)
        next_slot, count = max((page.slot for page in pages), default=-1) + 1, 0
        for start in range(0, len(pages), _CHUNK):
            some = pages[start : start + _CHUNK]
            triples = [value for page in some for value in (page.slot, page.key, page.generation)]
            count += self._run("adopt", [self.file, *triples])
        gaps = sorted(set(range(next_slot)) - {page.slot for page in pages})
        meta = {"slots": slot_count, "epoch": epoch, "next": next_slot}

        def finish() -> None:
            with self._redis.pipeline() as pipe:
                for start in range(0, len(gaps), _CHUNK):
                    pipe.rpush(f"{self._prefix}:f:{self.file}:free", *gaps[start : start + _CHUNK])
                pipe.hset(f"{self._prefix}:files", self.file, self._path)
                pipe.hset(f"{self._prefix}:f:{self.file}:meta", mapping=meta)  # from here on it is known
                pipe.execute()

        self._call(finish)
        return count

    def _forget(self, file: str) -> None:
        while self._run("forget", [file, _CHUNK]):
            pass

    def path_of(self, file: str) -> str | None:
        """See the protocol."""
        path = self._call(lambda: self._redis.hget(f"{self._prefix}:files", file))
        return None if path is None else os.fsdecode(path)

    def counts(self) -> IndexCounts:
        """See the protocol."""

        def read() -> Any:
            with self._redis.pipeline() as pipe:
                file = f"{self._prefix}:f:{self.file}"
                pipe.zcard(f"{file}:lru").hlen(f"{file}:writing").scard(f"{file}:retired").hget(f"{file}:meta", "slots")
                return pipe.execute()

        committed, writing, retired, slots = self._call(read)
        return IndexCounts(committed, writing, retired, int(slots or 0))

    def close(self) -> None:
        """See the protocol."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._redis.close()

    def _run(self, name: str, arguments: list[Any]) -> Any:
        return self._call(lambda: self._scripts[name](keys=[self._prefix], args=arguments))

    def _call(self, action: Callable[[], Any]) -> Any:
        if self._is_closed:
            raise IndexUnavailableError(f"kvcanary: the index at {self.address} is closed")
        if self._clock() < self._down_until:  # a call that waits for its timeout would hold up SGLang's I/O threads
            raise IndexUnavailableError(f"kvcanary: the index at {self.address} did not answer; trying again shortly")
        try:
            return action()
        except self._errors as error:
            self._down_until = self._clock() + RETRY_AFTER_S
            raise IndexUnavailableError(
                f"kvcanary: the index at {self.address} does not answer ({type(error).__name__}); "
                "pages are misses until it does"
            ) from error
        except self._response_error as error:
            if LOST in str(error):
                raise IndexLostError(f"kvcanary: the index at {self.address} does not know this page file") from error
            raise IndexUnavailableError(f"kvcanary: the index at {self.address} refused: {error}") from error


def _describe(place: Location) -> tuple[Any, ...]:
    return place.key, place.file, place.slot, place.generation


def _hide_password(url: str) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"
