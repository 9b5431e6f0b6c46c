"""A fake of ``hf3fs_fuse.io`` over ordinary files: a daemon thread per ring, and faults on demand.

It behaves like the real one where a client could be wrong: data moves when a request completes, not before; completions
name their request only by the offset of the buffer; failures are negative results, timeouts are short lists, and what
timed out is still in flight. A mount is a folder that holds a folder ``3fs-virt``.
"""

from __future__ import annotations

import errno
import mmap
import multiprocessing.shared_memory  # SGLang's client relies on this import
import os
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass
from pathlib import Path

KINDS = (
    *("reorder", "fail", "short", "hole", "late", "never", "duplicate"),
    *("torn", "flip", "stale", "misdirected"),
)


@dataclass
class Fault:
    """Strikes ``count`` requests (-1: all) after ``skip`` have passed; only reads or writes, only an offset, a minimal
    or maximal size, if given. ``value`` is an errno (fail), bytes (short, torn, misdirected) or a bit (flip).
    """

    kind: str
    read: bool | None = None
    offset: int | None = None
    min_size: int = 0
    max_size: int = 1 << 60
    skip: int = 0
    count: int = 1
    value: int = 0
    seconds: float = 0.2
    struck: int = 0

    def strikes(self, request: Request) -> bool:
        if (self.read is not None and request.read != self.read) or self.count == 0:
            return False
        if self.offset is not None and request.offset != self.offset:
            return False
        if not self.min_size <= request.size <= self.max_size:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.count -= 1
        self.struck += 1
        return True


_lock = threading.RLock()
_faults: list[Fault] = []
_before: dict[tuple[int, int], bytes] = {}  # what stood at (inode, offset) before the last write to it
_registered: dict[int, tuple[int, int, bool, bool]] = {}  # fd -> own descriptor, inode, readable, writable
_held: list[Request] = []  # never answered


def inject(kind: str, **settings: int | float | bool) -> Fault:
    """Plan a fault."""
    assert kind in KINDS, kind
    fault = Fault(kind, **settings)
    with _lock:
        _faults.append(fault)
    return fault


def reset() -> None:
    """Forget all faults, and answer what was never answered."""
    with _lock:
        _faults.clear()
        _before.clear()
    release()


def release() -> None:
    """Answer what was never answered."""
    with _lock:
        held = list(_held)
        _held.clear()
    for request in held:
        request.ring._complete(request, request.carry_out([]))


def extract_mount_point(path: str) -> str | None:
    for folder in Path(path).resolve(strict=True).parents:
        if (folder / "3fs-virt").is_dir():
            return str(folder)
    return None


def register_fd(fd: int, flags: int = 0) -> None:
    import fcntl

    try:
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        on_mount = extract_mount_point(os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:
        raise OSError(errno.EBADF, "not a 3FS fd") from None
    if on_mount is None:
        raise OSError(errno.EBADF, "not a 3FS fd")
    with _lock:
        if fd in _registered:
            raise OSError(errno.EINVAL, "already registered")
        entry = (os.dup(fd), os.fstat(fd).st_ino, mode != os.O_WRONLY, mode != os.O_RDONLY)
        _registered[fd] = entry


def deregister_fd(fd: int) -> None:
    with _lock:
        entry = _registered.get(fd)
        try:
            same = entry is not None and os.fstat(fd).st_ino == entry[1]
        except OSError:
            same = False
        if same:
            del _registered[fd]  # its duplicate stays open: requests may still be in flight


def force_fsync(fd: int) -> int:
    os.fsync(fd)
    return 0


class iovec:  # noqa: N801 - the name of the real one
    """A piece of a buffer."""

    def __init__(self, owner: _Iovec, start: int, stop: int) -> None:
        self.owner, self.base_off, self.size = owner, start, stop - start
        self.result, self.userdata = 0, None


class _Iovec:
    def __init__(self, shm: multiprocessing.shared_memory.SharedMemory, mount: str, block_size: int, numa: int) -> None:
        self.link = Path(mount) / "3fs-virt" / "iovs" / str(uuid.uuid4())
        os.symlink(f"/dev/shm/{shm.name.lstrip('/')}", self.link)  # FileNotFoundError where this is no mount
        fd = os.open(f"/dev/shm/{shm.name.lstrip('/')}", os.O_RDWR)
        try:
            self.memory = mmap.mmap(fd, shm.size)  # the daemon maps it for itself
        finally:
            os.close(fd)
        self.size = shm.size

    def __getitem__(self, piece: slice) -> iovec:
        start, stop, step = piece.indices(self.size)
        assert step == 1
        return iovec(self, start, stop)

    def __del__(self) -> None:
        if hasattr(self, "memory"):
            self.link.unlink(missing_ok=True)


def make_iovec(
    shm: multiprocessing.shared_memory.SharedMemory, mount: str, block_size: int = 0, numa: int = -1
) -> _Iovec:
    return _Iovec(shm, mount, block_size, numa)


@dataclass(eq=False)
class Request:
    """One transfer in the daemon."""

    ring: ioring
    piece: iovec
    read: bool
    fd: int
    inode: int
    offset: int

    @property
    def size(self) -> int:
        return self.piece.size

    def carry_out(self, faults: list[Fault]) -> int:
        """Move the data. Returns the result."""
        kinds = {fault.kind: fault for fault in faults}
        if "fail" in kinds:
            return -(kinds["fail"].value or errno.EIO)
        offset, size = self.offset, self.size
        if "misdirected" in kinds:
            offset += kinds["misdirected"].value or size
        memory = self.piece.owner.memory
        start = self.piece.base_off
        if self.read:
            data = os.pread(self.fd, size, offset)
            if "hole" in kinds:
                data = bytes(size)
            if "stale" in kinds:
                data = _before.get((self.inode, offset), bytes(size))[:size]
            if "short" in kinds:
                data = data[: kinds["short"].value]
            if "torn" in kinds:
                data = data[: kinds["torn"].value] + bytes(len(data) - kinds["torn"].value)
            data = self._flip(kinds, data)
            memory[start : start + len(data)] = data
            return len(data)
        data = self._flip(kinds, bytes(memory[start : start + size]))
        result = size
        if "hole" in kinds:
            data = bytes(size)
        if "short" in kinds:
            data = data[: kinds["short"].value]
            result = len(data)
        if "torn" in kinds:
            data = data[: kinds["torn"].value]  # the rest is lost, and nobody says so
        if "stale" not in kinds:  # a stale write is acknowledged and lost
            with _lock:
                _before[self.inode, offset] = os.pread(self.fd, size, offset).ljust(size, b"\0")
            os.pwrite(self.fd, data, offset)
        return result

    @staticmethod
    def _flip(kinds: dict[str, Fault], data: bytes) -> bytes:
        if "flip" not in kinds or not data:
            return data
        changed = bytearray(data)
        byte, bit = divmod(kinds["flip"].value % (8 * len(data)), 8)
        changed[byte] ^= 1 << bit
        return bytes(changed)


class ioring:  # noqa: N801 - the name of the real one
    """A ring and the daemon's thread behind it."""

    def __init__(self, mount: str, entries: int, for_read: bool) -> None:
        if not (Path(mount) / "3fs-virt").is_dir():
            raise OSError(errno.ENOENT, "no 3FS mount")
        self.entries, self.for_read = entries, for_read
        self.prepared: list[Request] = []
        self.done: deque[iovec] = deque()
        self.outstanding = 0
        self.changed = threading.Condition()

    @staticmethod
    def size_for_entries(entries: int) -> int:
        return 4096 + 96 * entries

    def prepare(self, piece: iovec, read: bool, fd: int, off: int, userdata: object = None) -> ioring:
        if read != self.for_read or piece.size == 0:
            raise OSError(errno.EINVAL, "wrong direction or no length")
        with _lock:
            entry = _registered.get(fd)
        if entry is None:
            raise OSError(errno.EBADF, "not registered")
        if not entry[2 if read else 3]:
            raise OSError(errno.EACCES, "opened in another mode")
        with self.changed:
            if self.outstanding >= self.entries:
                raise OSError(errno.EAGAIN, "the ring is full")
            self.outstanding += 1
            piece.userdata = userdata
            self.prepared.append(Request(self, piece, read, entry[0], entry[1], off))
        return self

    def submit(self) -> ioring:
        with self.changed:
            batch, self.prepared = self.prepared, []
        threading.Thread(target=self._serve, args=(batch,), daemon=True).start()
        return self

    def wait(self, *, max_results: int = 0, min_results: int = 0, timeout: object = None) -> list[iovec]:
        """Like the real one: without arguments a poll for at most one result."""
        seconds = None if timeout is None else timeout.total_seconds()
        with self.changed:
            if min_results:
                self.changed.wait_for(lambda: len(self.done) >= min_results, seconds)
            count = min(len(self.done), max_results or max(min_results, 1))
            return [self.done.popleft() for _ in range(count)]

    def _serve(self, batch: list[Request]) -> None:
        plans = []
        with _lock:
            for request in batch:
                plans.append((request, [fault for fault in _faults if fault.strikes(request)]))
        if any(fault.kind == "reorder" for _, faults in plans for fault in faults):
            plans.reverse()
        for request, faults in plans:
            kinds = {fault.kind for fault in faults}
            if "never" in kinds:
                with _lock:
                    _held.append(request)
                continue
            if "late" in kinds:
                seconds = next(fault.seconds for fault in faults if fault.kind == "late")
                threading.Thread(target=self._serve_late, args=(request, faults, seconds), daemon=True).start()
                continue
            self._complete(request, request.carry_out(faults), "duplicate" in kinds)

    def _serve_late(self, request: Request, faults: list[Fault], seconds: float) -> None:
        time.sleep(seconds)
        self._complete(request, request.carry_out(faults))

    def _complete(self, request: Request, result: int, twice: bool = False) -> None:
        with self.changed:
            request.piece.result = result
            self.done.append(request.piece)
            if twice:
                self.done.append(request.piece)
            self.outstanding -= 1
            self.changed.notify_all()


def make_ioring(
    mount: str,
    entries: int,
    for_read: bool = True,
    io_depth: int = 0,
    priority: int | None = None,
    timeout: int | None = None,
    numa: int = -1,
    flags: int = 0,
) -> ioring:
    return ioring(mount, entries, for_read)
