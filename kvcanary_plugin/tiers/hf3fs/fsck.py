"""``kvcanary fsck``: is a page file what it says it is, and can what is not be dropped."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from ...display import escape_controls
from .errors import PageFileError
from .header import Header, read_header
from .local import LocalClient
from .opening import SAFELY, lock_file, require_regular
from .page import PageEntry, PageRead
from .page_file import PageFile

CLEAN, DAMAGED, UNUSABLE = range(3)  # exit codes
BATCH_BYTES = 64 << 20
SHOWN = 20


@dataclass
class Findings:
    """What was found in one page file."""

    header: Header
    faults: list[str]
    states: dict[str, int] = field(default_factory=dict)
    recorded: int = 0  # committed pages with records of the GPU
    verified: int | None = None
    dropped: int = 0

    @property
    def code(self) -> int:
        """The exit code."""
        return DAMAGED if self.faults else CLEAN


def run_fsck(path: str | Path, console: Console, *, deep: bool = False, repair: bool = False) -> int:
    """Check a page file and print what was found. Returns 0 if it is clean, 1 if damage was found, repaired or not, and
    2 if it is no page file, cannot be read, or is in use.
    """
    try:
        findings = check_file(Path(path), console, deep=deep, repair=repair)
    except PageFileError as error:
        console.print(_plain(str(error), "red"), soft_wrap=True)
        return UNUSABLE
    except OSError as error:
        text = f"{path} cannot be read: {error.strerror}; give the page file itself, as FOLDER/NAME"
        console.print(_plain(text, "red"), soft_wrap=True)
        return UNUSABLE
    render(findings, Path(path), console, repair)
    return findings.code


def check_file(path: Path, console: Console, *, deep: bool, repair: bool) -> Findings:
    """Look at headers and trailers, with ``deep`` at every page, and drop what is damaged with ``repair``. Nobody can
    open the file for writing meanwhile. Raises ``PageFileError`` and ``OSError``.
    """
    fd = os.open(path, os.O_RDONLY | SAFELY)
    try:
        require_regular(fd, path)
        if not repair:
            lock_file(fd, path, fcntl.LOCK_SH)
        header, faults = read_header(fd, str(path))
        layout = header.layout
        if repair:
            file = PageFile.open(path, header.geometry, capacity_bytes=layout.file_bytes)
        else:
            client = LocalClient(path, layout.file_bytes, layout.stride, read_only=True)
            file = PageFile(path, os.dup(fd), header, client, read_only=True)
        findings = Findings(header, faults + file.faults)
        with file:
            findings.faults += [f"slot {slot}: found damaged before" for slot in file.quarantined_slots()]
            if deep:
                findings.verified = check_pages(file, findings, console)
            if repair:
                findings.dropped = file.repair()
            findings.states, findings.recorded = file.count_states(), file.count_with_records()
    finally:
        os.close(fd)
    return findings


def check_pages(file: PageFile, findings: Findings, console: Console) -> int:
    """Read every page. Returns how many are good."""
    entries = sorted(file.committed(), key=lambda entry: entry.slot)
    size = file.payload_bytes
    count = max(1, min(BATCH_BYTES // size, len(entries)))
    memory = np.empty((count, size), np.uint8)
    good = 0
    columns = TextColumn("pages"), BarColumn(), TaskProgressColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("pages", total=len(entries) * size)
        for first in range(0, len(entries), count):
            chosen = entries[first : first + count]
            for entry, reason in zip(chosen, read_pages(file, chosen, memory), strict=True):
                good += reason == "ok"
                if reason != "ok":
                    findings.faults.append(f"slot {entry.slot}: the page does not verify ({reason})")
            progress.advance(task, len(chosen) * size)
    return good


def read_pages(
    file: PageFile, entries: list[PageEntry], memory: np.ndarray[tuple[int, int], np.dtype[np.uint8]]
) -> list[str]:
    """Read some pages into memory that is used again. Returns the reasons of their verdicts."""
    batch = [
        PageRead(entry.key, entry.slot, entry.generation, (page,))
        for entry, page in zip(entries, memory[: len(entries)], strict=True)
    ]
    return [verdict.reason for verdict in file.read(batch)]


def render(findings: Findings, path: Path, console: Console, repair: bool) -> None:
    """Print what was found."""
    header = findings.header
    title = _plain(f"{path.name}  {header.uuid.hex()}", "italic")
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in header.geometry.identity:
        table.add_row(_plain(name), _plain(value))
    table.add_row("page", f"{header.geometry.payload_bytes:,} bytes, records at most {header.geometry.records_bytes:,}")
    table.add_row("slots", f"{header.slot_count:,}")
    for state, count in findings.states.items():
        table.add_row(state, f"{count:,}")
    table.add_row("with records", f"{findings.recorded:,}")
    if findings.verified is not None:
        table.add_row("verified", f"{findings.verified:,}")
    table.add_row("last writer", f"epoch {header.epoch}, {'did not close it' if header.opened else 'closed it'}")
    console.print(table, highlight=False)
    for fault in findings.faults[:SHOWN]:
        console.print(_plain(fault, "red"), soft_wrap=True)
    if len(findings.faults) > SHOWN:
        console.print(f"[red]... {len(findings.faults) - SHOWN} more", highlight=False)
    if not findings.faults:
        console.print("[green]clean" + ("" if findings.verified is not None else "; pages were not read (--deep)"))
    elif repair:
        console.print(f"[yellow]repaired: {findings.dropped} damaged pages were dropped")
    else:
        console.print("[red]damage found; --repair drops damaged pages, and reading them is a miss in any case")


def _plain(text: str, style: str = "") -> Text:
    """What a file says of itself may hold markup and control characters."""
    return Text(escape_controls(text), style)
