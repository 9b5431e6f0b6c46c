"""The event log: one JSON object a line, appended, so that several ranks may share a file."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ..errors import ConfigError, KvcanaryError

SCHEMA = 1
MAX_LINE_BYTES = 8 << 20  # the longest there are list the slots of one request
# How every line begins; what is cut off in the middle of this is still one.
_HEAD = f'{{"schema":{SCHEMA},"event":"'


class LogError(KvcanaryError, ValueError):
    """A file is no event log; names file and line, what was expected there, and what to do about it."""


@dataclass(frozen=True, slots=True)
class Line:
    """One event as it stands in a file.

    Attributes:
        place: file and line number, for messages.
        event: its fields; ``event`` and ``schema`` are as they should be, everything else may be anything.
    """

    place: str
    event: dict[str, Any]

    def reject(self, problem: str) -> NoReturn:
        """Raise :class:`LogError` for this line."""
        raise _error(self.place, problem)


class EventLog:
    """Appends events to a file. Each line is written at once and flushed, so a crash loses at most the last one.

    Raises:
        ConfigError: the file cannot be opened for appending.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            # Token ids may be confidential: readable by the owner and the group only.
            # Without O_NONBLOCK a named pipe nobody reads would hold up the server's start.
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o640)
            self._end_cut_line()
        except OSError as error:
            raise ConfigError(f"kvcanary: cannot append to --kvcanary-log {str(path)!r}: {error.strerror}") from error

    def write(self, event: str, fields: dict[str, Any]) -> None:
        """Append one event; ``schema``, ``time`` (seconds since 1970) and ``pid`` are added."""
        line = {"schema": SCHEMA, "event": event, "time": round(time.time(), 6), "pid": os.getpid(), **fields}
        # One write call: lines of several processes do not mix.
        text = (json.dumps(line, separators=(",", ":")) + "\n").encode()
        if os.write(self._file, text) != len(text):
            raise OSError(f"only a part of a line of {len(text)} bytes was written")

    def close(self) -> None:
        """Flush to the disk and close."""
        with contextlib.suppress(OSError):  # a pipe has no disk
            os.fsync(self._file)
        os.close(self._file)

    def _end_cut_line(self) -> None:
        """A crash may have cut the last line of the file; what follows starts on a line of its own."""
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            return
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")


class LogReader:
    """Goes through an event log line by line, in memory for one line.

    Attributes:
        path: the file.
        cut_lines: numbers of lines that a crash cut short, or that are being written just now; left out.
        line_count: lines seen so far.
        identity: device and inode, by which the same file is known under another name.

    Raises:
        LogError: the file cannot be opened, or (while iterating) a line is not an event of this schema.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.cut_lines: list[int] = []
        self.line_count = 0
        try:
            # A name that turns out to be a pipe is refused rather than waited for.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise _error(str(self.path), f"cannot be opened ({why})") from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise _error(str(self.path), "is not a regular file")
        self.identity = status.st_dev, status.st_ino
        self._file: BinaryIO = os.fdopen(descriptor, "rb")

    def __iter__(self) -> Iterator[Line]:
        with self._file:
            while raw := self._file.readline(MAX_LINE_BYTES + 1):
                self.line_count += 1
                place = f"{self.path}:{self.line_count}"
                if len(raw) > MAX_LINE_BYTES:
                    raise _error(place, f"is longer than {MAX_LINE_BYTES >> 20} MiB")
                text = raw.rstrip(b"\r\n")
                is_ended = raw.endswith(b"\n")
                event = self._parse(text, place, is_ended=is_ended) if text.strip() else None
                if event is not None:
                    yield Line(place, event)

    def close(self) -> None:
        """Close the file; iterating to the end does so too."""
        self._file.close()

    def _parse(self, raw: bytes, place: str, *, is_ended: bool) -> dict[str, Any] | None:
        try:
            event = json.loads(raw.decode(), parse_constant=_refuse_constant)
        except RecursionError:
            raise _error(place, "is nested too deeply") from None
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8 (byte {error.start})"
        except ValueError as error:
            problem = (
                f"is not JSON: {error.msg}" if isinstance(error, json.JSONDecodeError) else f"is not JSON: {error}"
            )
        else:
            if not isinstance(event, dict) or event.get("schema") != SCHEMA or not isinstance(event.get("event"), str):
                raise _error(place, f"is not an event of kvcanary schema {SCHEMA}")
            return event
        if _is_cut(raw, is_ended=is_ended):
            self.cut_lines.append(self.line_count)
            return None
        raise _error(place, problem)


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """All events of a file. A line cut short by a crash is left out; any other bad line is an error.

    Raises:
        LogError: a line is not an event of this schema; names the line.
    """
    return [line.event for line in LogReader(path)]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _is_cut(raw: bytes, *, is_ended: bool) -> bool:
    """Whether a line that is no JSON is the beginning of an event: a crash, or a full disk, came between.

    The writer ends such a line when it opens the file again, so it may lie in the middle. After a loss of power a file
    may also end in zeros that were never written.
    """
    raw = raw.rstrip(b"\0")
    text = re.sub(r"\s", "", raw[: 4 * len(_HEAD)].decode(errors="replace"))
    if not (text.startswith(_HEAD) or _HEAD.startswith(text)):
        return False
    if not is_ended:
        return True
    # Without its strings a whole line is brackets and numbers. One pass, whatever the line holds.
    strings = re.compile(rb'"(?:[^"\\]|\\.|\\\Z)*("|\Z)', re.DOTALL)
    is_open = any(not match[1] for match in strings.finditer(raw))
    outside = strings.sub(b"", raw)
    opened = sum(outside.count(mark) for mark in (b"{", b"["))
    return is_open or opened > sum(outside.count(mark) for mark in (b"}", b"]"))


def _error(place: str, problem: str) -> LogError:
    return LogError(
        f"kvcanary: {place} {problem}. Expected one JSON object a line, as a server with --kvcanary-log writes it: "
        "give such a file, or cut a line out that is damaged"
    )
