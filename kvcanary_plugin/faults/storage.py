"""Faults of the storage tier, each a small program that is run on a page store while it is used. For drills and tests.

A program is a generator: what stands ahead of its ``yield`` is done when the pages have been stored once, the rest when
they have been stored again, before they are read.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..tiers.hf3fs.checksum import digest_parts
from ..tiers.hf3fs.client import Batch
from ..tiers.hf3fs.header import read_header
from ..tiers.hf3fs.index import Entry
from ..tiers.hf3fs.store import PageStore

_FROM_END = 512  # bytes of a page that a torn write leaves out


@dataclass
class Target:
    """Where pages were stored.

    Attributes:
        store: open for writing.
        keys: of the pages, two at least.
        index: its SQLite database.
        open_again: opens the store again once it was closed.
    """

    store: PageStore
    keys: Sequence[bytes]
    index: Path
    open_again: Callable[[], PageStore]

    @property
    def path(self) -> Path:
        """Of the page file."""
        return Path(self.store.file.path)

    @property
    def slots(self) -> list[int]:
        """Of the pages, in the page file."""
        slots = {entry.key: entry.slot for entry in self.store.file.scan()}
        return [slots[key] for key in self.keys]

    def offset_of(self, slot: int) -> int:
        """Where the slot begins in the page file."""
        with self.path.open("rb") as file:
            layout = read_header(file.fileno(), str(self.path))[0].layout
        return layout.data_offset + slot * layout.stride

    def load(self, slot: int) -> bytes:
        """The bytes of a page, behind the store's back."""
        with self.path.open("rb") as file:
            return os.pread(file.fileno(), self.store.file.payload_bytes, self.offset_of(slot))

    def put(self, slot: int, data: bytes, start: int = 0) -> None:
        """Overwrite bytes of a page, behind the store's back."""
        with self.path.open("r+b") as file:
            os.pwrite(file.fileno(), data, self.offset_of(slot) + start)

    def restart(self, meanwhile: Callable[[], None]) -> None:
        """Close the store, do something, and open it again."""
        self.store.close()
        meanwhile()
        self.store = self.open_again()


Program = Callable[[Target], Iterator[None]]


def flip_bit(target: Target) -> Iterator[None]:
    """Flip one bit of a stored page."""
    yield
    slot = target.slots[0]
    data = target.load(slot)
    middle = len(data) // 2
    target.put(slot, bytes([data[middle] ^ 4]), middle)


def zero_tail(target: Target) -> Iterator[None]:
    """Lose the end of a page, as a torn write does."""
    yield
    target.put(target.slots[0], bytes(_FROM_END), target.store.file.payload_bytes - _FROM_END)


def truncate(target: Target) -> Iterator[None]:
    """Cut the file off within the page that lies last in it."""
    yield
    os.truncate(target.path, target.offset_of(max(target.slots)) + target.store.file.payload_bytes // 2)


def put_back_old_version(target: Target) -> Iterator[None]:
    """Put the bytes of an earlier version of a page back, as a lost write does."""
    kept = target.load(target.slots[0])
    yield
    target.put(target.slots[0], kept)


def swap_pages(target: Target) -> Iterator[None]:
    """Exchange two pages under their keys."""
    yield
    one, other = target.slots[:2]
    kept = target.load(one)
    target.put(one, target.load(other))
    target.put(other, kept)


def shift_results(target: Target) -> Iterator[None]:
    """Give each request of a batch the page of the next one, and call all of it read."""
    yield
    client, read = _client_of(target), _client_of(target).read

    def shifted(batch: Batch) -> None:
        moved = Batch([*batch.offsets[1:], *batch.offsets[:1]], batch.parts, batch.sizes, batch.digests is not None)
        read(moved)
        batch.results, batch.digests = moved.results, moved.digests

    client.read = shifted


def return_last_buffer(target: Target) -> Iterator[None]:
    """Answer a batch with what the batch ahead of it has read."""
    yield
    client, read = _client_of(target), _client_of(target).read
    answered: dict[tuple[int, ...], list[list[bytes]]] = {}

    def repeated(batch: Batch) -> None:
        read(batch)
        now = [[bytes(part) for part in parts] for parts in batch.parts]
        others = [kept for offsets, kept in answered.items() if offsets != tuple(batch.offsets)]
        answered[tuple(batch.offsets)] = now  # asked once more, it answers the same
        for parts, kept in zip(batch.parts, others[-1] if others else now, strict=False):
            for part, data in zip(parts, kept, strict=True):
                part[:] = data
        if batch.digests is not None:
            batch.digests = [digest_parts(parts) for parts in batch.parts]

    client.read = repeated


def restart_with_old_index(target: Target) -> Iterator[None]:
    """Start again with the index as it was when the pages were stored for the first time."""
    kept = target.index.with_suffix(".kept")
    target.restart(lambda: _copy_database(target.index, kept))
    yield
    target.restart(lambda: _copy_database(kept, target.index))


def believe_old_index(target: Target) -> Iterator[None]:
    """The same without a restart, so that nothing says that the index is an old one."""
    file = target.store.file
    entries = [Entry(entry.key, entry.slot, entry.generation) for entry in file.scan()]
    yield
    target.store.index.rebuild(entries, file.slot_count, file.epoch)


# What reading must report of each; nothing where the store has made good what was done.
STORAGE_FAULTS: dict[str, tuple[Program, frozenset[str]]] = {
    "flip_bit": (flip_bit, frozenset(("digest",))),
    "zero_tail": (zero_tail, frozenset(("digest",))),
    "truncate": (truncate, frozenset(("short",))),
    "put_back_old_version": (put_back_old_version, frozenset(("digest",))),
    "swap_pages": (swap_pages, frozenset(("digest",))),
    "shift_results": (shift_results, frozenset(("digest",))),
    "return_last_buffer": (return_last_buffer, frozenset(("digest",))),
    "restart_with_old_index": (restart_with_old_index, frozenset()),
    "believe_old_index": (believe_old_index, frozenset(("key", "generation", "free", "writing"))),
}


def _client_of(target: Target) -> Any:
    return target.store.file._client


def _copy_database(source: Path, target: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            os.unlink(f"{target}{suffix}")
        if os.path.exists(f"{source}{suffix}"):
            shutil.copy(f"{source}{suffix}", f"{target}{suffix}")
