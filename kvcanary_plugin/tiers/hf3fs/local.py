"""Local disk: vectored positional I/O straight into and out of the memory of the pages."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from xxhash import xxh3_128, xxh3_128_digest

from .checksum import digest_parts
from .client import BLOCK_BYTES, Batch, CheckedClient
from .layout import round_up

# Small enough to be in the second-level cache between the transfer and the check, large enough that a call costs little
# and that threads seldom wait for the interpreter. Half and twice of it were slower.
PIECE_BYTES = 256 * 1024
RUN_BYTES = 512 * 1024  # neighbours that go in one call
SCRAP_BYTES = 32 * 1024  # not worth a call of their own
MAX_VECTORS = 1024  # the kernel's limit


class LocalClient(CheckedClient):
    """Transfers happen in the thread that asks for them. ``o_direct`` bypasses the page cache; memory that is not
    aligned for it goes through a buffer.

    A file that does not exist is created with ``size`` bytes, unless ``read_only``. Raises ``OSError``.
    """

    def __init__(
        self,
        path: str | Path,
        size: int,
        bytes_per_page: int,
        entries: int = 1024,
        *,
        o_direct: bool = False,
        read_only: bool = False,
    ) -> None:
        super().__init__(size, bytes_per_page, entries)
        if o_direct and bytes_per_page % BLOCK_BYTES:
            raise ValueError(f"bytes_per_page={bytes_per_page}: o_direct needs a multiple of {BLOCK_BYTES}")
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
        self._fd = os.open(path, flags | (os.O_DIRECT if o_direct else 0) | os.O_CLOEXEC, 0o600)
        if not read_only and os.fstat(self._fd).st_size == 0:
            os.ftruncate(self._fd, size)
        self._o_direct = o_direct
        self._bounce = threading.local()

    def flush(self) -> None:
        """``fsync``."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Wait for transfers under way, then close the file."""
        if self._gate.close():
            os.close(self._fd)

    def _transfer(self, batch: Batch, for_read: bool) -> None:
        move = os.preadv if for_read else os.pwritev
        for run in self._cut_runs(batch):
            if len(run) > 1 and self._move_run(batch, run, for_read, move):
                continue
            for index in run:
                try:
                    if self._o_direct:
                        self._move_direct(batch, index, for_read, move)
                    elif batch.sizes[index] <= PIECE_BYTES and len(batch.parts[index]) <= MAX_VECTORS:
                        self._move_whole(batch, index, for_read, move)
                    else:
                        self._move_pieces(batch, index, for_read, move)
                except OSError as error:
                    batch.results[index] = -(error.errno or errno.EIO)

    def _cut_runs(self, batch: Batch) -> list[range]:
        """Requests that lie one behind the other in the file and are small go together."""
        runs, first, size, end = [], 0, 0, -1
        for index, offset in enumerate(batch.offsets):
            if offset != end or size + batch.sizes[index] > RUN_BYTES or self._o_direct:
                if index:
                    runs.append(range(first, index))
                first, size = index, 0
            size += batch.sizes[index]
            end = offset + batch.sizes[index]
        if len(batch):
            runs.append(range(first, len(batch)))
        return runs

    def _move_run(self, batch: Batch, run: range, for_read: bool, move: Callable[..., int]) -> bool:
        """Neighbouring requests in one call. False if not all of it was transferred: then each is made alone, so that
        each gets its own answer.
        """
        parts = [part for index in run for part in batch.parts[index]]
        if len(parts) > MAX_VECTORS:
            return False
        if not for_read:
            digest_requests(batch, run)
        sizes = batch.sizes[run.start : run.stop]
        try:
            if move(self._fd, parts, batch.offsets[run.start]) != sum(sizes):
                return False
        except OSError:
            return False
        batch.results[run.start : run.stop] = sizes
        if for_read:
            digest_requests(batch, run)
        return True

    def _move_whole(self, batch: Batch, index: int, for_read: bool, move: Callable[..., int]) -> None:
        """One request in one call."""
        parts, size = batch.parts[index], batch.sizes[index]
        if not for_read:
            digest_requests(batch, (index,))
        done = move(self._fd, parts, batch.offsets[index])
        if done < size:
            done = self._finish(parts, size, batch.offsets[index], done, move)
        batch.results[index] = done
        if for_read:
            digest_requests(batch, (index,))

    def _move_pieces(self, batch: Batch, index: int, for_read: bool, move: Callable[..., int]) -> None:
        """One request in pieces that stay in the cache between the transfer and the check."""
        offset, state, done = batch.offsets[index], xxh3_128(), 0
        parts = batch.parts[index]
        for group, size in plan_pieces(tuple([part.nbytes for part in parts])):
            pieces = [parts[place][start:stop] for place, start, stop in group]
            if not for_read:
                hash_pieces(state, batch, pieces)
            got = move(self._fd, pieces, offset + done)
            if got < size:
                got = self._finish(pieces, size, offset + done, got, move)
            done += got
            if got < size:
                break
            if for_read:
                hash_pieces(state, batch, pieces)
        batch.results[index] = done
        if batch.digests is not None:
            batch.digests[index] = state.digest()

    def _finish(self, parts: Sequence[memoryview], size: int, offset: int, done: int, move: Callable[..., int]) -> int:
        """Go on after a transfer that stopped early, until the end of the file."""
        while done < size:
            more = move(self._fd, skip_bytes(parts, done)[:MAX_VECTORS], offset + done)
            if more == 0:
                break
            done += more
        return done

    def _move_direct(self, batch: Batch, index: int, for_read: bool, move: Callable[..., int]) -> None:
        """One request past the page cache."""
        parts, size, offset = batch.parts[index], batch.sizes[index], batch.offsets[index]
        if not for_read:
            digest_requests(batch, (index,))
        done = -1
        if size % BLOCK_BYTES == 0:
            try:
                done = move(self._fd, parts, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:  # else the file system does not take the memory as it lies
                    raise
        if done < 0:
            buffer = self._buffer(round_up(size, BLOCK_BYTES))
            if not for_read:
                copy_parts(parts, buffer, into_buffer=True)
                buffer[size:] = bytes(buffer.nbytes - size)
            done = min(move(self._fd, [buffer], offset), size)
            if for_read and done == size:
                copy_parts(parts, buffer, into_buffer=False)
        if for_read and done == size:
            digest_requests(batch, (index,))
        batch.results[index] = done

    def _buffer(self, size: int) -> memoryview:
        """Page-aligned memory of this thread."""
        buffer: mmap.mmap | None = getattr(self._bounce, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._bounce.buffer = mmap.mmap(-1, round_up(max(size, self.bytes_per_page), BLOCK_BYTES))
        return memoryview(buffer)[:size]


def digest_requests(batch: Batch, indices: Iterable[int]) -> None:
    """Make the digests of some requests, if they are wanted."""
    digests, parts = batch.digests, batch.parts
    if digests is not None:
        for index in indices:
            pieces = parts[index]
            digests[index] = xxh3_128_digest(pieces[0]) if len(pieces) == 1 else digest_parts(pieces)


def hash_pieces(state: xxh3_128, batch: Batch, pieces: Iterable[memoryview]) -> None:
    """Go on with the digest of a request, if it is wanted."""
    if batch.digests is not None:
        for piece in pieces:
            state.update(piece)


@lru_cache(maxsize=64)
def plan_pieces(sizes: tuple[int, ...]) -> list[tuple[list[tuple[int, int, int]], int]]:
    """How to cut parts of these sizes into groups of ``PIECE_BYTES``, in order: (part, start, stop) of each piece of a
    group, and the size of the group. What is left behind the last whole group, if it is little, goes with that one.
    """
    groups: list[tuple[list[tuple[int, int, int]], int]] = []
    group: list[tuple[int, int, int]] = []
    size = 0
    for place, part_bytes in enumerate(sizes):
        start = 0
        while start < part_bytes:
            stop = min(part_bytes, start + PIECE_BYTES - size)
            group.append((place, start, stop))
            size, start = size + stop - start, stop
            if size == PIECE_BYTES or len(group) == MAX_VECTORS:
                groups.append((group, size))
                group, size = [], 0
    if group and groups and size <= SCRAP_BYTES and len(group) + len(groups[-1][0]) <= MAX_VECTORS:
        last, last_size = groups.pop()
        groups.append((last + group, last_size + size))
    elif group:
        groups.append((group, size))
    return groups


def skip_bytes(pieces: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of the pieces after their first bytes."""
    left = []
    for piece in pieces:
        if count < piece.nbytes:
            left.append(piece[count:])
        count = max(0, count - piece.nbytes)
    return left


def copy_parts(parts: Sequence[memoryview], buffer: memoryview, into_buffer: bool) -> None:
    """Copy between pieces of memory and one buffer."""
    start = 0
    for part in parts:
        piece = buffer[start : start + part.nbytes]
        if into_buffer:
            piece[:] = part
        else:
            part[:] = piece
        start += part.nbytes
