"""kill -9 of a writer at random points: nothing wrong is ever returned, and what was committed is right or missing.

``KVCANARY_KILLS=200`` runs the long form.
"""

from __future__ import annotations

import io
import os
import random
import time
from pathlib import Path

from page_files import CAPACITY, GEOMETRY, fetch, reasons
from page_writer import Writer
from rich.console import Console

from kvcanary_plugin.tiers.hf3fs.fsck import run_fsck
from kvcanary_plugin.tiers.hf3fs.page_file import PageFile

KILLS = int(os.environ.get("KVCANARY_KILLS", "12"))


def check_after_kill(path: Path, batches: list[list[tuple[int, int, int]]]) -> tuple[int, int]:
    """Open the file as the next process does. Returns how many committed pages are right, and how many found."""
    output = io.StringIO()
    assert run_fsck(path, Console(file=output, width=120), deep=True) == 0, output.getvalue()
    with PageFile.open(path, GEOMETRY, capacity_bytes=CAPACITY) as file:
        assert file.faults == []
        entries = {entry.slot: entry for entry in file.scan()}
        numbers = {slot: int.from_bytes(entry.key, "little") for slot, entry in entries.items()}
        verdicts = fetch(file, numbers, [entries[slot].generation for slot in numbers])  # compares the content
        assert set(reasons(verdicts)) <= {"ok"}
        # Each page that the writer was told is stored, newest first: right, or another page is there now.
        newest: dict[int, tuple[int, int]] = {}
        for batch in batches:
            for slot, number, generation in batch:
                newest[slot] = number, generation
        committed = fetch(file, {s: n for s, (n, _) in newest.items()}, [g for _, g in newest.values()])
        assert set(reasons(committed)) <= {"ok", "free", "writing", "key", "generation"}
        assert file.counters.quarantined == 0
        return reasons(committed).count("ok"), len(newest)


def test_kill_nine_at_random_points(tmp_path: Path):
    rng = random.Random(20)
    path = tmp_path / "pages"
    right = committed = batches = 0
    for kill in range(KILLS):
        with Writer(path, seed=kill + 1) as process:
            if kill % 4:
                process.wait_for_commits(1)
                time.sleep(rng.uniform(0, 0.04))
            else:
                time.sleep(rng.uniform(0.05, 0.4))  # perhaps while it opens the file, or makes it
            process.kill()
        if not path.exists() or not path.stat().st_size:
            continue
        good, found = check_after_kill(path, process.committed())
        right, committed, batches = right + good, committed + found, batches + len(process.lines)
        assert good >= 0.5 * found - 14, (good, found)  # the last batch, and what was discarded or being overwritten
    print(
        f"\n{KILLS} kills after {batches} batches: {right} of {committed} pages right, the others missing, none wrong"
    )
    assert right > 0
