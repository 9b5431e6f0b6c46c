"""How far a soak has come, in a file that is written anew every minute, so that one that is cut off says something."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "soak.json"
WAITING, STARTING, CLEAN, DRILLING, DONE = "waiting", "starting", "clean", "drilling", "done"
NOT_STARTED, ENDED, NOT_RUN = "not started", "ended", "not run"
COLUMNS = ("requests", "aborted", "flushes", "updates", "forwards", "verified", "stored", "folded")
HEAD = "| mode | state | clean, s | " + " | ".join(COLUMNS) + " | reports | drill |"


@dataclass(slots=True)
class Row:
    """One mode so far.

    Attributes:
        clean_seconds: of traffic, without the start and the drill.
        counts: requests and what the guard did in the clean part, see :data:`COLUMNS`.
        reports: events of the clean part that should not be there.
        drill: what became of the faults; empty before.
        is_passed: the drill is.
        why: it did not start, or ended; with the end of its log.
    """

    state: str = WAITING
    clean_seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0))
    reports: list[dict[str, Any]] = field(default_factory=list)
    drill: str = ""
    is_passed: bool = False
    why: str = ""

    def render(self, name: str) -> str:
        """As a row of the table."""
        counts = (f"{self.counts[column]:,}" for column in COLUMNS)
        cells = (name, self.state, f"{self.clean_seconds:.0f}", *counts, str(len(self.reports)), self.drill)
        return f"| {' | '.join(cells)} |"

    @property
    def is_bad(self) -> bool:
        """Something was reported, the server or its guard is gone, or a fault was not found."""
        return bool(self.reports) or self.state == ENDED or (self.state == DONE and not self.is_passed)


class Board:
    """The rows of all modes, and their file in ``folder``. Rows are written to from one thread each."""

    def __init__(self, modes: list[str], folder: Path, about: dict[str, Any]) -> None:
        self.rows = {name: Row() for name in modes}
        self._path = folder / FILE
        self._about = {**about, "pid": os.getpid(), "began": time.strftime("%H:%M:%S")}
        self._lock = threading.Lock()

    def save(self) -> None:
        """Write the file; whoever reads it sees a whole one."""
        with self._lock:
            rows = {name: dataclasses.asdict(row) for name, row in self.rows.items()}
            text = json.dumps({**self._about, "written": time.time(), "modes": rows}, indent=1)
            part = self._path.with_suffix(".part")
            part.write_text(text)
            part.rename(self._path)

    def exit_code(self) -> int:
        """1 if any mode is bad, else 2 if one did not start or run to its end, else 0."""
        if any(row.is_bad for row in self.rows.values()):
            return 1
        return 0 if all(row.state == DONE for row in self.rows.values()) else 2


def render_rows(rows: dict[str, Row]) -> list[str]:
    """The table, and below it what went wrong."""
    lines = [HEAD, "|---" * (HEAD.count("|") - 1) + "|", *(row.render(name) for name, row in rows.items())]
    for name, row in rows.items():
        lines += [f"\n{name}: {json.dumps(event)[:600]}" for event in row.reports[:5]]
        lines += [f"\n{name} {row.state}: {row.why}"] if row.why else []
    return lines


def render_file(folder: Path) -> str:
    """What the file in ``folder`` says.

    Raises:
        OSError: there is none.
    """
    said = json.loads((folder / FILE).read_text())
    rows = {name: Row(**fields) for name, fields in said.pop("modes").items()}
    age = time.time() - said.pop("written")
    return "\n".join([f"{json.dumps(said)}, written {age:.0f} s ago", *render_rows(rows)])
