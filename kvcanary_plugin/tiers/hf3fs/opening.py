"""Opening a page file: one writer at a time, and nothing is written before the file is known to be the right one."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from ...display import escape_controls
from .client import Client
from .errors import CapacityMismatch, GeometryMismatch, InUse, NotAPageFile, PageFileError
from .geometry import Geometry
from .header import Header, describe_owner, read_header, write_header
from .layout import Layout
from .local import LocalClient
from .usrbio import UsrbioClient

# A link could lead anywhere, and a pipe that nobody writes to would be waited for.
SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def open_for_writing(
    path: Path, geometry: Geometry, layout: Layout, *, create: bool, may_take: bool
) -> tuple[int, Header]:
    """Lock, check and take over an existing file, or make a new one. Returns a descriptor, which holds the lock, and
    the header as it now stands in the file. Without ``may_take`` a file that a process on another host has open, or has
    not closed, is in use.
    """
    try:
        fd = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0) | SAFELY, 0o600)
    except OSError as error:
        raise PageFileError(f"cannot open {path}: {error.strerror}; make its folder, or give another path") from error
    try:
        require_regular(fd, path)
        lock_file(fd, path, fcntl.LOCK_EX)
        if os.fstat(fd).st_size == 0:
            uuid, salt = secrets.token_bytes(16), secrets.randbits(31) + 1
            header = Header(geometry, layout.slot_count, uuid, salt, opened=True, owner=describe_owner())
        else:
            header = take_over(fd, path, geometry, layout, may_take)
        write_header(fd, header)
        # After the header, so that a process that dies in between leaves a page file behind. What was never written
        # reads as zeros, which say that nothing is there.
        if os.fstat(fd).st_size < layout.file_bytes:
            os.ftruncate(fd, layout.file_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd, header


def open_for_reading(path: Path, geometry: Geometry) -> tuple[int, Header]:
    """Open and check an existing file that somebody else may be writing."""
    try:
        fd = os.open(path, os.O_RDONLY | SAFELY)
    except OSError as error:
        raise PageFileError(
            f"cannot open {path}: {error.strerror}; it is made by the process that writes it"
        ) from error
    try:
        require_regular(fd, path)
        header, _ = read_header(fd, str(path))
        check_geometry(path, header, geometry)
    except BaseException:
        os.close(fd)
        raise
    return fd, header


def require_regular(fd: int, path: Path) -> None:
    """Raise ``NotAPageFile`` for a pipe, a device or a folder."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise NotAPageFile(f"{path} is no regular file: give another path")


def make_client(
    kind: str | Callable[..., Client],
    path: Path,
    layout: Layout,
    o_direct: bool,
    read_only: bool,
) -> Client:
    """The client by name, or by calling the function given. Raises ``PageFileError``."""
    size, stride = layout.file_bytes, layout.stride
    try:
        if callable(kind):
            return kind(path, size, stride, read_only=read_only)
        if kind == "local":
            return LocalClient(path, size, stride, o_direct=o_direct, read_only=read_only)
        if kind == "usrbio":
            return UsrbioClient(path, size, stride, read_only=read_only)
    except OSError as error:
        hint = "; the file system may not support O_DIRECT" if o_direct else ""
        raise PageFileError(f"cannot do {kind} I/O on {path}: {error}{hint}") from error
    raise PageFileError(f"there is no client {kind!r}: use local or usrbio")


def flock_decides(kind: str | Callable[..., Client]) -> bool:
    """Whether the file is only reached from this host, so that holding its lock proves that nobody else writes."""
    made = getattr(kind, "func", kind)  # what a functools.partial makes
    return kind == "local" or (isinstance(made, type) and issubclass(made, LocalClient))


def lock_file(fd: int, path: Path, kind: int) -> None:
    """Take the lock of a file without waiting. Raises ``InUse``."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise InUse(f"{path} is in use{describe_user(fd, path)}: stop it, or give another path") from None


def describe_user(fd: int, path: Path) -> str:
    """Who opened the file last, as far as its header says."""
    try:
        owner = json.loads(read_header(fd, str(path))[0].owner)
        return f" by process {int(owner['pid'])} on {escape_controls(str(owner['host']))[:64]}"
    except (NotAPageFile, OSError, ValueError, KeyError, TypeError, RecursionError):
        return " by another process"


def take_over(fd: int, path: Path, geometry: Geometry, layout: Layout, may_take: bool) -> Header:
    """The header of the next epoch of an existing file."""
    header, _ = read_header(fd, str(path))
    check_geometry(path, header, geometry)
    if header.layout != layout:
        raise CapacityMismatch(
            f"{path} has {header.slot_count} slots in {header.layout.file_bytes} bytes, the capacity asked for would "
            f"give {layout.slot_count}: ask for {header.layout.file_bytes} bytes, or remove the file"
        )
    if header.opened and not may_take and _other_host(header):
        raise InUse(
            f"{path} was opened{describe_user(fd, path)} and not closed, and from here nobody can tell whether that "
            "process lives: if it does not, open with takeover"
        )
    return header.next(epoch=header.epoch + 1, opened=True, owner=describe_owner())


def check_geometry(path: Path, header: Header, geometry: Geometry) -> None:
    """Raise ``GeometryMismatch`` unless the file was made for this geometry."""
    if header.geometry != geometry:
        differences = escape_controls("; ".join(header.geometry.differences(geometry)))
        raise GeometryMismatch(
            f"{path} was made for other pages ({differences}): give another path, or remove the file"
        )


def _other_host(header: Header) -> bool:
    try:
        return bool(json.loads(header.owner).get("boot") != json.loads(describe_owner())["boot"])
    except (ValueError, AttributeError, RecursionError):
        return True
