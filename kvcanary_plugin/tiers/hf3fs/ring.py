"""One ring of 3FS's user-space I/O, with the shared memory that its requests use.

Completions come in any order, possibly late or not at all, and each says by the offset of its buffer which request it
answers. After a timeout the daemon still owns the buffers of what it has not answered, so ring, buffers and shared
memory are given up together and freed when the last answer has come.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from xxhash import xxh3_128

from .client import Batch

COPY_BYTES = 256 * 1024  # of a copy and its check at a time, to stay in the cache


class Ring:
    """Used by one thread only. ``io`` is the module ``hf3fs_fuse.io``. Raises ``OSError`` if it cannot be made."""

    def __init__(self, io: Any, mount: str, entries: int, slot_bytes: int, for_read: bool) -> None:
        self._slot_bytes, self._for_read = slot_bytes, for_read
        self._pending: dict[int, int] = {}  # requests by offset of the buffer
        self._batch = Batch((), (), [])
        self._slices: list[Any] = []  # kept alive while the daemon may use them
        self.sound = True
        self._memory = SharedMemory(create=True, size=entries * slot_bytes)
        try:
            self._buffer = io.make_iovec(self._memory, mount)
            self._ring = io.make_ioring(mount, entries, for_read=for_read)
        except BaseException:
            self._buffer = self._ring = None
            self._memory.close()
            raise
        finally:
            self._memory.unlink()

    def transfer(self, fd: int, batch: Batch, indices: Sequence[int], timeout_seconds: float) -> None:
        """Answer some requests, no more than the ring has entries. ``sound`` is false afterwards if the ring must not
        be used again: a request was not answered in time, or an answer came that nobody had asked for.
        """
        self._batch = batch
        for slot, index in enumerate(indices):
            self._prepare(fd, slot * self._slot_bytes, index)
        deadline = time.monotonic() + timeout_seconds
        try:
            if self._pending:
                self._ring.submit()
            while self._pending and (left := deadline - time.monotonic()) > 0:
                count = len(self._pending)
                for answer in self._ring.wait(max_results=count, min_results=count, timeout=timedelta(seconds=left)):
                    self._accept(answer)
            code = errno.ETIMEDOUT
            for answer in self._ring.wait():  # one too many would be taken for one of the next batch
                self._accept(answer)
        except OSError as error:
            code = error.errno or errno.EIO
            self.sound = False
        if self._pending:
            self.sound = False
            batch.refuse(self._pending.values(), code)
        if self.sound:
            self._slices.clear()

    def in_flight(self) -> list[tuple[int, int]]:
        """Start and end, in the file, of what the daemon may still transfer."""
        offsets, sizes = self._batch.offsets, self._batch.sizes
        return [(offsets[index], offsets[index] + sizes[index]) for index in self._pending.values()]

    def drain(self) -> bool:
        """Take late answers without waiting. Returns whether the daemon has answered everything."""
        try:
            while self._pending and (answers := self._ring.wait()):
                for answer in answers:
                    self._pending.pop(answer.base_off, None)
        except OSError:
            return False
        return not self._pending

    def free(self) -> None:
        """Give back ring and memory; only after ``drain`` has said so."""
        self._slices.clear()
        self._ring = self._buffer = None
        self._memory.close()

    def _prepare(self, fd: int, start: int, index: int) -> None:
        batch = self._batch
        size = batch.sizes[index]
        if size == 0:
            batch.results[index] = 0
            return
        if not self._for_read:
            self._copy(index, start)
        piece = self._buffer[start : start + size]
        try:
            self._ring.prepare(piece, self._for_read, fd, batch.offsets[index])
        except OSError as error:
            batch.refuse([index], error.errno or errno.EIO)
            return
        self._slices.append(piece)
        self._pending[piece.base_off] = index

    def _accept(self, answer: Any) -> None:
        index = self._pending.pop(answer.base_off, None)
        if index is None:
            self.sound = False  # answered twice: nothing that this ring says later can be trusted
            return
        size, result = self._batch.sizes[index], int(answer.result)
        self._batch.results[index] = result if result <= size else -errno.EIO
        if self._for_read and result == size:
            self._copy(index, answer.base_off)

    def _copy(self, index: int, start: int) -> None:
        """Between the shared memory and the memory of the request; the digest is of the memory of the request."""
        memory, digests, state = self._memory.buf, self._batch.digests, xxh3_128()
        assert memory is not None
        for part in self._batch.parts[index]:
            for first in range(0, part.nbytes, COPY_BYTES):
                piece = part[first : first + COPY_BYTES]
                if self._for_read:
                    piece[:] = memory[start : start + piece.nbytes]
                if digests is not None:
                    state.update(piece)
                if not self._for_read:
                    memory[start : start + piece.nbytes] = piece
                start += piece.nbytes
        if digests is not None:
            digests[index] = state.digest()
