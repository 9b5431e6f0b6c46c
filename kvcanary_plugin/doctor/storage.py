"""The folder, the index and the page files of the storage tier. Nothing is written, and no file is locked."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from pathlib import Path

from ..display import escape_controls, mask_secrets
from ..errors import ConfigError
from ..tiers.hf3fs.errors import PageFileError
from ..tiers.hf3fs.header import Header, describe_owner, read_header
from ..tiers.hf3fs.opening_store import SUFFIX
from ..tiers.hf3fs.options import StorageOptions, parse_options, to_extra_config
from ..tiers.hf3fs.usrbio import import_io
from .checkup import Fact, Problem, Section
from .redis import examine_redis

MAX_FILES_READ = 256
MOUNTS = Path("/proc/self/mountinfo")
HF3FS = "fuse.hf3fs"


def examine_storage(setting: str) -> Section:
    """Look at what ``--kvcanary-hf3fs SETTING`` would use."""
    try:
        options = parse_options(json.loads(to_extra_config(setting)))
    except ConfigError as error:
        problem = Problem("error", mask_secrets(str(error)), "correct --kvcanary-hf3fs or KVCANARY_HF3FS")
        return Section("storage", (Fact("setting", mask_secrets(setting), "error"),), problems=(problem,))
    problems: list[Problem] = []
    paths = _find_page_files(Path(options.path))
    taken = sum(path.stat().st_blocks * 512 for path in paths)
    facts = [Fact("setting", mask_secrets(setting)), *_look_at_folder(options, taken, problems)]
    facts.append(_look_for_extension(options, problems))
    if options.uses_redis:
        facts.append(examine_redis(str(options.index), problems))
    elif options.index:
        facts.append(_look_at_index_folder(Path(options.index), problems))
    rows = _describe_page_files(paths, problems)
    return Section("storage", tuple(facts), tuple(rows), tuple(problems))


def file_system_of(path: Path) -> str | None:
    """Type of the file system that ``path`` is on, such as ``ext4`` or ``fuse.hf3fs``; None if that cannot be told."""
    try:
        lines = MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return None
    found: tuple[int, str] | None = None
    path = path.resolve()
    for line in lines:
        before, _, after = line.partition(" - ")
        where = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), before.split(" ")[4]))
        depth = len(where.parts)
        if path.is_relative_to(where) and (found is None or depth >= found[0]):  # the latest mount hides others
            found = depth, after.split(" ")[0]
    return None if found is None else found[1]


def _look_at_folder(options: StorageOptions, taken: int, problems: list[Problem]) -> list[Fact]:
    folder = Path(options.path)
    there = _nearest_existing(folder)
    usable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    if not usable:
        what = "is no folder" if not there.is_dir() else "cannot be written by this user"
        problems.append(
            Problem("error", f"{there} {what}, so no page file can be made", "give its owner's rights, or another path")
        )
    if there.stat().st_mode & stat.S_IWOTH:
        problems.append(
            Problem(
                "warning",
                f"anybody may write to {there}, and so put pages there that verify",
                "make it a folder that only the server's user may write to: chmod 700",
            )
        )
    state = "exists" if folder == there and folder.is_dir() else "missing, would be made"
    free = shutil.disk_usage(there).free
    is_tight = free + taken < options.capacity_bytes  # a page file is sparse, and grows until it is full
    if is_tight:
        problems.append(
            Problem(
                "warning",
                f"{_gib(free)} are free at {there}; one page file grows to {_gib(options.capacity_bytes)}",
                "make room, or set ?capacity=",
            )
        )
    system = file_system_of(there)
    if options.client == "usrbio" and system != HF3FS:
        problems.append(
            Problem("error", f"client=usrbio, but {there} is on {system}, not on 3FS", "mount 3FS, or use client=local")
        )
    return [
        Fact("folder", f"{state}, {'writable' if usable else 'not writable'}", "ok" if usable else "error"),
        Fact("free", _gib(free), "warning" if is_tight else "ok"),
        Fact("file system", f"{system} (3FS)" if system == HF3FS else system),
    ]


def _look_for_extension(options: StorageOptions, problems: list[Problem]) -> Fact:
    try:
        import_io()
    except PageFileError as error:
        if options.client != "usrbio":
            return Fact("hf3fs_fuse", "not installed, and not needed by client=local")
        problems.append(Problem("error", "client=usrbio, but hf3fs_fuse cannot be imported", str(error)))
        return Fact("hf3fs_fuse", None, "error")
    return Fact("hf3fs_fuse", "can be imported")


def _look_at_index_folder(folder: Path, problems: list[Problem]) -> Fact:
    there = _nearest_existing(folder)
    usable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    if not usable:
        problems.append(
            Problem("error", f"the index cannot be made in {folder}", "set ?index= to a folder that can be written")
        )
    elif (file_system_of(there) or "").startswith(("fuse", "nfs")):
        problems.append(
            Problem("warning", f"{folder} is on {file_system_of(there)}", "set ?index= to a folder on a local disk")
        )
    return Fact("index", str(folder), "ok" if usable else "error")


def _find_page_files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.glob(f"*{SUFFIX}") if stat.S_ISREG(path.lstat().st_mode))
    except OSError:
        return []


def _describe_page_files(paths: list[Path], problems: list[Problem]) -> list[dict[str, str]]:
    rows = []
    for path in paths[:MAX_FILES_READ]:
        size = path.stat().st_blocks * 512
        state, can_check = _describe_page_file(path)
        if state.startswith("cannot"):
            problems.append(
                Problem("warning", f"{escape_controls(path.name)}: {state}", "remove it if no server uses it")
            )
        check = "possible" if can_check else "no"
        rows.append({"page file": escape_controls(path.name), "disk": _gib(size), "state": state, "fsck": check})
    if len(paths) > MAX_FILES_READ:
        rows.append({"page file": f"... {len(paths) - MAX_FILES_READ} more", "disk": "", "state": "", "fsck": ""})
    return rows


def _describe_page_file(path: Path) -> tuple[str, bool]:
    """Its state by its header alone, and whether fsck could look at it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            header, faults = read_header(fd, path.name)
        finally:
            os.close(fd)
    except PageFileError:
        return "cannot be read: no page file of this version", False
    except OSError as error:
        return f"cannot be read: {error.strerror}", False
    if header.opened:
        user, is_alive = _find_user(header)
        return (f"in use by {user}", False) if is_alive else (f"not closed by {user}", True)
    return ("closed" if not faults else "closed, one header copy is damaged"), True


def _find_user(header: Header) -> tuple[str, bool]:
    """Who opened a page file last, and whether that process may live."""
    try:
        owner, here = json.loads(header.owner), json.loads(describe_owner())
        host, pid, boot = str(owner["host"]), int(owner["pid"]), owner.get("boot")
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return "an unknown process", True
    user = f"process {pid} on {escape_controls(host)[:64]}"
    return user, boot != here["boot"] or Path(f"/proc/{pid}").exists()


def _nearest_existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
