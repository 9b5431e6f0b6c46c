"""Positional I/O on one file, behind one small protocol. A client answers by request, never by position."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable, Sequence
from ctypes import c_ubyte
from operator import add
from typing import Any, Protocol

BLOCK_BYTES = 4096
UNANSWERED = -(1 << 31)  # no errno: a request that nobody has answered is a failed one


class Batch:
    """Requests that are made together. Request ``i`` moves the contiguous range of the file at ``offsets[i]`` from or
    to the pieces of memory ``parts[i]``, in order; ``sizes[i]`` is how many bytes that is.

    ``results[i]`` is the answer to request ``i``, whatever order the answers come in: bytes transferred, or a negative
    errno. With ``digest``, ``digests[i]`` is the xxh3_128 of the bytes as they lie in memory, made while they are hot
    in the cache: of what is about to be written, or of what has arrived *at its destination*.
    """

    __slots__ = ("digests", "offsets", "parts", "results", "sizes")

    def __init__(
        self, offsets: Sequence[int], parts: Sequence[Sequence[memoryview]], sizes: list[int], digest: bool = False
    ) -> None:
        self.offsets, self.parts, self.sizes = offsets, parts, sizes
        self.results = [UNANSWERED] * len(offsets)
        self.digests: list[bytes] | None = [b""] * len(offsets) if digest else None

    def __len__(self) -> int:
        return len(self.offsets)

    def refuse(self, indices: Iterable[int], code: int) -> None:
        """Answer some requests with an errno."""
        for index in indices:
            self.results[index] = -code


class Client(Protocol):
    """What a page file needs from its medium. All methods may be called from several threads at once."""

    size: int
    bytes_per_page: int
    entries: int

    def read(self, batch: Batch) -> None:
        """Answer every request. Raises ``ValueError``, before anything is done, if one lies outside the file."""

    def write(self, batch: Batch) -> None:
        """Answer every request. Raises ``ValueError``, before anything is done, if one lies outside the file."""

    def check(self, offsets: Sequence[int], tensors: Sequence[Any]) -> None:
        """Raise ``ValueError`` unless every page of the batch may be read or written as it stands."""

    def batch_read(self, offsets: Sequence[int], tensors: Sequence[Any]) -> list[int]:
        """Fill each tensor from its offset; returns for each the bytes read or a negative errno."""

    def batch_write(self, offsets: Sequence[int], tensors: Sequence[Any]) -> list[int]:
        """Store each tensor at its offset; returns for each the bytes written or a negative errno."""

    def flush(self) -> None:
        """Make acknowledged writes durable, as far as the medium can; raises ``OSError``."""

    def close(self) -> None:
        """Release everything. May be called more than once."""


def view_bytes(part: Any) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype, or of a buffer, as bytes, without a copy.

    The caller keeps the tensor alive. Raises ``ValueError`` if it is not contiguous or not on the CPU.
    """
    try:
        address = part.data_ptr()
    except AttributeError:
        return memoryview(part).cast("B")
    if not (part.is_cpu and part.is_contiguous()):
        kind = "not contiguous" if part.is_cpu else f"on {part.device}"
        raise ValueError(f"a page must be a contiguous tensor on the CPU; this one is {kind}: copy it first")
    # The buffer protocol of torch knows neither bfloat16 nor float8; the address does not care.
    return memoryview((c_ubyte * part.nbytes).from_address(address)).cast("B")


class Gate:
    """Lets transfers through until it is closed; closing waits for those under way, so that no descriptor is closed,
    and its number given to another file, while it is used.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside, self._closed = 0, False

    def __enter__(self) -> bool:
        with self._changed:
            self._inside += 1
            return not self._closed

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._inside -= 1
            if self._inside == 0:
                self._changed.notify_all()

    def close(self) -> bool:
        """Returns whether this call was the one that closed it."""
        with self._changed:
            first, self._closed = not self._closed, True
            self._changed.wait_for(lambda: self._inside == 0)
            return first


class CheckedClient:
    """The part that all clients share: nothing is transferred before the whole batch has been found in order, nor after
    ``close``.
    """

    def __init__(self, size: int, bytes_per_page: int, entries: int) -> None:
        if bytes_per_page <= 0 or entries <= 0 or size < bytes_per_page:
            raise ValueError(
                f"size={size}, bytes_per_page={bytes_per_page}, entries={entries}: all must be positive, and a page "
                "must fit into the file"
            )
        self.size, self.bytes_per_page, self.entries = size, bytes_per_page, entries
        self._gate = Gate()

    def read(self, batch: Batch) -> None:
        """Answer every request. A result smaller than asked for means that the file ends there, or has a hole."""
        self._run(batch, for_read=True)

    def write(self, batch: Batch) -> None:
        """Answer every request."""
        self._run(batch, for_read=False)

    def _run(self, batch: Batch, for_read: bool) -> None:
        self._check_range(batch)
        with self._gate as is_open:
            if is_open:
                self._transfer(batch, for_read)
            else:
                batch.refuse(range(len(batch)), errno.EBADF)

    def _transfer(self, batch: Batch, for_read: bool) -> None:
        raise NotImplementedError

    def check(self, offsets: Sequence[int], tensors: Sequence[Any]) -> None:
        """Raise ``ValueError`` unless every page of the batch may be read or written as it stands."""
        offsets, sizes = list(offsets), [int(tensor.nbytes) for tensor in tensors]
        fault = self._find_fault(offsets, sizes)
        for index, tensor in enumerate(tensors if fault is None else ()):
            try:
                view_bytes(tensor)
            except (TypeError, ValueError) as error:
                fault = f"entry {index}: {error}"
                break
        if fault:
            raise ValueError(f"Hf3fsClient.check: {offsets=}, {sizes=}: {fault}")

    def _find_fault(self, offsets: list[int], sizes: list[int]) -> str | None:
        if len(offsets) != len(sizes):
            index = min(len(offsets), len(sizes))
            return (
                f"entry {index} has {'no tensor' if index < len(offsets) else 'no offset'}; give each tensor one offset"
            )
        for index, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            entry = f"entry {index} (offset {offset}, size {size})"
            if index == self.entries:
                return f"{entry} is one more than the {self.entries} entries of a batch; split the batch"
            if size > self.bytes_per_page:
                return f"{entry} is larger than a page of {self.bytes_per_page} bytes"
            if offset < 0 or offset + size > self.size:
                return f"{entry} is outside the file of {self.size} bytes"
            if offset % self.bytes_per_page:
                return f"{entry} does not start at a multiple of the page size of {self.bytes_per_page} bytes"
        return None

    def _check_range(self, batch: Batch) -> None:
        if not len(batch) or (min(batch.offsets) >= 0 and max(map(add, batch.offsets, batch.sizes)) <= self.size):
            return
        for index, (offset, size) in enumerate(zip(batch.offsets, batch.sizes, strict=True)):
            if offset < 0 or offset + size > self.size:
                raise ValueError(
                    f"request {index} (offset {offset}, size {size}) is outside the file of {self.size} bytes"
                )

    def batch_read(self, offsets: Sequence[int], tensors: Sequence[Any]) -> list[int]:
        """Fill each tensor from its offset; returns for each the bytes read or a negative errno."""
        batch = self._make_batch(offsets, tensors)
        self.read(batch)
        return batch.results

    def batch_write(self, offsets: Sequence[int], tensors: Sequence[Any]) -> list[int]:
        """Store each tensor at its offset; returns for each the bytes written or a negative errno."""
        batch = self._make_batch(offsets, tensors)
        self.write(batch)
        return batch.results

    def _make_batch(self, offsets: Sequence[int], tensors: Sequence[Any]) -> Batch:
        self.check(offsets, tensors)
        parts = [(view_bytes(tensor),) for tensor in tensors]
        return Batch(offsets, parts, [part.nbytes for (part,) in parts])
