"""The event log: one JSON object a line, appended, so that several ranks may share a file."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

from ..errors import ConfigError

SCHEMA = 1


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


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """All events of a file. A line cut short by a crash is left out; any other bad line is an error.

    Raises:
        ValueError: a line is not an event of this schema; names the line.
    """
    events = []
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            event = json.loads(line)
        except json.JSONDecodeError as error:
            if not line.endswith("}"):
                continue
            raise ValueError(f"{path}:{number} is not JSON: {error.msg}") from error
        if not isinstance(event, dict) or event.get("schema") != SCHEMA or "event" not in event:
            raise ValueError(f"{path}:{number} is not an event of kvcanary schema {SCHEMA}")
        events.append(event)
    return events
