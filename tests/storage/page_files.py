"""Page files for the tests: on a local disk and on the fake of 3FS, with the same faults on both."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvcanary_plugin.tiers.hf3fs.checksum import digest_parts
from kvcanary_plugin.tiers.hf3fs.client import Batch
from kvcanary_plugin.tiers.hf3fs.geometry import Geometry
from kvcanary_plugin.tiers.hf3fs.local import LocalClient, copy_parts
from kvcanary_plugin.tiers.hf3fs.page import PageRead, PageWrite, Verdict
from kvcanary_plugin.tiers.hf3fs.page_file import PageFile
from kvcanary_plugin.tiers.hf3fs.usrbio import UsrbioClient

FAKES = str(Path(__file__).parent / "fakes")
if FAKES not in sys.path:
    sys.path.insert(0, FAKES)
from hf3fs_fuse import io as fake  # noqa: E402

PAGE_BYTES, RECORDS_BYTES = 20_000, 64
GEOMETRY = Geometry(
    (("model", "tiny"), ("dtype", "bfloat16"), ("layout", "page_first"), ("page_tokens", "16"), ("tp", "0/1")),
    PAGE_BYTES,
    RECORDS_BYTES,
)
CAPACITY = 4 << 20
TIMEOUT_SECONDS = 0.25


class FaultyLocalClient(LocalClient):
    """The local client on a disk with the faults that are planned for the fake of 3FS."""

    def _cut_runs(self, batch: Batch) -> list[range]:
        return [range(index, index + 1) for index in range(len(batch))]  # a fault strikes one request

    def _move_whole(self, batch: Batch, index: int, for_read: bool, move: Any) -> None:
        offset, size = batch.offsets[index], batch.sizes[index]
        seen = SimpleNamespace(read=for_read, offset=offset, size=size)
        with fake._lock:
            faults = {fault.kind: fault for fault in fake._faults if fault.strikes(seen)}
        inode = os.fstat(self._fd).st_ino
        if not for_read:
            with fake._lock:
                fake._before[inode, offset] = os.pread(self._fd, size, offset).ljust(size, b"\0")
        if not faults.keys() - {"reorder", "late", "duplicate"}:  # these do not exist on a local disk
            super()._move_whole(batch, index, for_read, move)
        elif "fail" in faults or "never" in faults:
            batch.results[index] = -errno.EIO
        else:
            self._move_faulty(batch, index, for_read, faults, inode)

    def _move_faulty(self, batch: Batch, index: int, for_read: bool, faults: dict[str, Any], inode: int) -> None:
        parts, size = batch.parts[index], batch.sizes[index]
        memory = bytearray(size)
        piece = SimpleNamespace(base_off=0, size=size, owner=SimpleNamespace(memory=memory))
        if not for_read:
            copy_parts(parts, memoryview(memory), into_buffer=True)
        transfer = fake.Request(None, piece, for_read, self._fd, inode, batch.offsets[index])
        batch.results[index] = transfer.carry_out(list(faults.values()))
        if for_read and batch.results[index] == size:
            copy_parts(parts, memoryview(memory), into_buffer=False)
        if batch.digests is not None:
            batch.digests[index] = digest_parts(parts)


@dataclass
class Medium:
    """Where the page files of a test lie, and how they are reached."""

    name: str
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "pages"

    @property
    def client(self) -> Any:
        if self.name == "local":
            return FaultyLocalClient
        return partial(UsrbioClient, entries=8, timeout_seconds=TIMEOUT_SECONDS)

    def open(self, geometry: Geometry = GEOMETRY, path: Path | None = None, **options: Any) -> PageFile:
        options = {"capacity_bytes": CAPACITY, "client": self.client} | options
        return PageFile.open(path or self.path, geometry, **options)


def make_medium(name: str, folder: Path) -> Medium:
    (folder / "3fs-virt" / "iovs").mkdir(parents=True, exist_ok=True)
    return Medium(name, folder)


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def payload_of(number: int, size: int = PAGE_BYTES) -> np.ndarray:
    """Bytes that no other page has, none of them zero."""
    return np.random.default_rng(number).integers(1, 256, size, dtype=np.uint8)


def records_of(number: int) -> bytes:
    return (number.to_bytes(4, "little") * 16)[: number % 3 * 32]


def halves(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """K and V, which lie apart in memory."""
    return data[: data.size // 3].copy(), data[data.size // 3 :].copy()


def store(file: PageFile, pages: dict[int, int]) -> list[int | None]:
    """Write pages, given as slot: number. Returns their generations."""
    return file.write([PageWrite(key_of(n), slot, halves(payload_of(n)), records_of(n)) for slot, n in pages.items()])


def fetch(file: PageFile, pages: dict[int, int], generations: list[int | None]) -> list[Verdict]:
    """Read pages, given as slot: number, and insist that whatever is called good is right."""
    targets = [np.full(file.payload_bytes, 0xEE, np.uint8) for _ in pages]
    cut = file.payload_bytes // 3
    batch = [
        PageRead(key_of(number), slot, generation or 0, (target[:cut], target[cut:]))
        for (slot, number), generation, target in zip(pages.items(), generations, targets, strict=True)
    ]
    verdicts = file.read(batch)
    for number, target, verdict in zip(pages.values(), targets, verdicts, strict=True):
        if verdict.ok:
            assert (target == payload_of(number, file.payload_bytes)).all(), f"page {number} is wrong and called good"
            assert verdict.records == records_of(number), f"records of page {number} are wrong and called good"
    return verdicts


def reasons(verdicts: list[Verdict]) -> list[str]:
    return [verdict.reason for verdict in verdicts]


def fetch_all(file: PageFile) -> dict[int, str]:
    """Read every page that a scan finds. Returns number: reason."""
    entries = list(file.scan())
    numbers = {entry.slot: int.from_bytes(entry.key, "little") for entry in entries}
    verdicts = fetch(file, numbers, [entry.generation for entry in entries])
    return dict(zip(numbers.values(), reasons(verdicts), strict=True))


def abandon(file: PageFile) -> None:
    """Let go of a page file as the death of its process would: nothing is written any more."""
    file._closed = True
    file._client.close()
    os.close(file._fd)


def patch(path: Path, offset: int, data: bytes) -> None:
    """Overwrite bytes of a file behind everybody's back."""
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))
