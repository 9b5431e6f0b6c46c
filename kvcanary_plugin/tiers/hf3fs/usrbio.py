"""3FS through its user-space I/O (USRBIO): shared memory in, shared memory out, without the kernel in between."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from .client import BLOCK_BYTES, Batch, CheckedClient
from .errors import PageFileError
from .layout import round_up
from .ring import Ring

MAX_RETIRED = 8  # rings of one owner that wait for late answers; more would eat the memory of the host
LEAKED: list[Ring] = []  # the daemon may still write into these: they are never freed before this process ends
TIMEOUT_SECONDS = 5.0


class Job(NamedTuple):
    """Some requests of a batch for one ring, and who waits for them."""

    batch: Batch
    indices: Sequence[int]
    answered: threading.Event


class UsrbioClient(CheckedClient):
    """``entries`` requests at a time on each of ``rings`` rings for reading and as many for writing, each with an owner
    thread and ``entries`` buffers of one page. A request that is not answered within ``timeout_seconds`` fails with
    ``ETIMEDOUT``; while a late write may still reach a range of the file, other writes to it fail with ``EBUSY``.

    Raises ``PageFileError`` if ``hf3fs_fuse`` is not installed or the path is not on a 3FS mount, and ``OSError``.
    """

    def __init__(
        self,
        path: str | Path,
        size: int,
        bytes_per_page: int,
        entries: int = 32,
        *,
        rings: int = 1,
        timeout_seconds: float = TIMEOUT_SECONDS,
        read_only: bool = False,
    ) -> None:
        super().__init__(size, bytes_per_page, entries)
        self._io = import_io()
        self._owners: list[RingOwner] = []
        self._queues: tuple[SimpleQueue[Job | None], ...] = (SimpleQueue(), SimpleQueue())  # write, read
        self._fd = os.open(path, (os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT) | os.O_CLOEXEC, 0o600)
        try:
            if not read_only and os.fstat(self._fd).st_size == 0:
                os.ftruncate(self._fd, size)
            mount = self._io.extract_mount_point(str(path))
            if mount is None:
                raise PageFileError(f"{path} is not on a 3FS mount: use the local client, or a path below the mount")
            self._io.register_fd(self._fd)
            in_flight = LateWrites()
            for for_read in (True,) if read_only else (True, False):
                for _ in range(rings):
                    owner = RingOwner(
                        *(self._io, mount, self._fd, entries, round_up(bytes_per_page, BLOCK_BYTES)),
                        *(for_read, timeout_seconds, self._queues[for_read], in_flight),
                    )
                    self._owners.append(owner)
        except BaseException:
            self.close()
            raise

    def flush(self) -> None:
        """``fsync``: makes the length exact; how durable the data is, is up to the storage."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Wait for transfers under way, then give everything back that the daemon does not use any more."""
        if not self._gate.close():
            return
        for owner in self._owners:
            self._queues[owner.for_read].put(None)
        for owner in self._owners:
            owner.join()
        self._io.deregister_fd(self._fd)  # before close, or the number would stand for the old file
        os.close(self._fd)

    def _check_range(self, batch: Batch) -> None:
        super()._check_range(batch)
        limit = round_up(self.bytes_per_page, BLOCK_BYTES)
        for index, size in enumerate(batch.sizes):
            if size > limit:
                raise ValueError(f"request {index} has {size} bytes; the buffers of this client have {limit}")

    def _transfer(self, batch: Batch, for_read: bool) -> None:
        count = len(batch)
        jobs = [
            Job(batch, range(first, min(first + self.entries, count)), threading.Event())
            for first in range(0, count, self.entries)
        ]
        for job in jobs:
            self._queues[for_read].put(job)
        for job in jobs:
            job.answered.wait()


class LateWrites:
    """Where in the file late writes may still arrive. Shared by the owners of all rings for writing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[object, list[tuple[int, int]]] = {}

    def replace(self, owner: object, ranges: list[tuple[int, int]]) -> None:
        """Say all that one owner has in flight on rings it has given up."""
        with self._lock:
            self._ranges[owner] = ranges

    def overlap(self, start: int, end: int) -> bool:
        """Whether a late write may hit a range."""
        with self._lock:
            return any(first < end and start < last for ranges in self._ranges.values() for first, last in ranges)


class RingOwner(threading.Thread):
    """The one thread that uses a ring. It replaces the ring when it can no longer be trusted."""

    def __init__(
        self,
        io: Any,
        mount: str,
        fd: int,
        entries: int,
        slot_bytes: int,
        for_read: bool,
        timeout_seconds: float,
        queue: SimpleQueue[Job | None],
        late_writes: LateWrites,
    ) -> None:
        super().__init__(name=f"kvcanary-usrbio-{'read' if for_read else 'write'}", daemon=True)
        self.for_read = for_read
        self._make: Callable[[], Ring] = partial(Ring, io, mount, entries, slot_bytes, for_read)
        self._fd, self._timeout_seconds, self._queue, self._late_writes = fd, timeout_seconds, queue, late_writes
        self._ring: Ring | None = self._make()  # now, so that a mount that does not work is an error at once
        self._retired: list[Ring] = []
        self.start()

    def run(self) -> None:
        """Serve jobs until told to stop."""
        while (job := self._queue.get()) is not None:
            try:
                self._serve(job.batch, job.indices)
            except Exception as error:  # whatever it is, the callers must not wait for ever
                job.batch.refuse(job.indices, getattr(error, "errno", None) or errno.EIO)
                self._retire()
            finally:
                job.answered.set()
        self._drain()
        if self._ring:
            self._ring.free()
        LEAKED.extend(self._retired)

    def _serve(self, batch: Batch, indices: Sequence[int]) -> None:
        self._drain()
        if self._ring is None:
            if len(self._retired) >= MAX_RETIRED:
                batch.refuse(indices, errno.ENOBUFS)
                return
            self._ring = self._make()
        if not self.for_read:
            ends = {index: batch.offsets[index] + batch.sizes[index] for index in indices}
            late = [index for index in indices if self._late_writes.overlap(batch.offsets[index], ends[index])]
            batch.refuse(late, errno.EBUSY)
            indices = [index for index in indices if index not in late]
        self._ring.transfer(self._fd, batch, indices, self._timeout_seconds)
        if not self._ring.sound:
            self._retire()
            self._drain()

    def _retire(self) -> None:
        if self._ring:
            self._retired.append(self._ring)
            self._ring = None

    def _drain(self) -> None:
        if not self._retired:
            return
        waiting = []
        for ring in self._retired:
            if ring.drain():
                ring.free()
            else:
                waiting.append(ring)
        self._retired = waiting
        if not self.for_read:
            self._late_writes.replace(self, [span for ring in waiting for span in ring.in_flight()])


def import_io() -> Any:
    """The module ``hf3fs_fuse.io``. Raises ``PageFileError`` saying where it comes from."""
    try:
        from hf3fs_fuse import io  # type: ignore[import-not-found]  # built on the host, if at all
    except ImportError as error:
        raise PageFileError(
            f"the usrbio client needs the Python package hf3fs_fuse ({error}): build hf3fs_py_usrbio from the sources "
            "of 3FS, since what is on PyPI cannot be installed, or use the local client on the mount"
        ) from error
    return io
