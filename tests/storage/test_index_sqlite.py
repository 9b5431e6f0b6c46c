"""What only the SQLite index has to withstand: kill -9, damage, other processes, a machine that went down."""

import contextlib
import random
import signal
import sqlite3
import subprocess
import sys
import time
import uuid

import pytest

from kvcanary_plugin.tiers.hf3fs import sqlite_index
from kvcanary_plugin.tiers.hf3fs.index import Entry, IndexUnavailableError
from kvcanary_plugin.tiers.hf3fs.sqlite_index import SqliteIndex

FILE = uuid.UUID(int=1).hex
SLOTS = 64

WRITER = """
import sys
from kvcanary_plugin.tiers.hf3fs.index import Reservation
from kvcanary_plugin.tiers.hf3fs.sqlite_index import SqliteIndex

path, file, slots, epoch = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
index = SqliteIndex(path, file)
if not index.attach(slots, epoch):
    index.rebuild([], slots, epoch)
generation = epoch << 20
while True:
    generation += 1
    key = (generation % 200).to_bytes(16, "big")
    held = [r for r in index.reserve([key]) if isinstance(r, Reservation)]
    index.release([p for p in index.lookup([key]) if p])
    index.commit([(r, generation) for r in held])
    for r in held:  # said only once it is committed
        print(int.from_bytes(r.key, "big"), r.slot, generation, flush=True)
"""


def key(number):
    return number.to_bytes(16, "big")


def test_kill_9_at_random_points_loses_no_commit(tmp_path):
    """After every kill the next process finds an intact, warm index that agrees with what was acknowledged."""
    path = tmp_path / "index.sqlite"
    chance = random.Random(0)
    for epoch in range(1, 11):
        command = [sys.executable, "-c", WRITER, str(path), FILE, str(SLOTS), str(epoch)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            first = writer.stdout.readline()
            time.sleep(chance.uniform(0.0, 0.1))
            writer.send_signal(signal.SIGKILL)
            lines = (first + writer.stdout.read()).splitlines(keepends=True)
        said = [tuple(map(int, line.split())) for line in lines if line.endswith("\n")]
        assert said, "the writer came up"
        reader = SqliteIndex(path, FILE)
        # What was said last cannot have been evicted by the one step that may have followed.
        for number, slot, generation in said[-SLOTS // 2 :]:
            [place] = reader.lookup([key(number)])
            assert (place.slot, place.generation) == (slot, generation)
        reader.close()
    index = SqliteIndex(path, FILE)
    assert index.attach(SLOTS, 11), "warm"
    counts = index.counts()
    assert counts.writing == 0
    assert counts.committed + counts.free == SLOTS
    assert sum(place is not None for place in index.lookup([key(n) for n in range(200)])) == counts.committed
    index.close()
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_after_a_power_cut_it_asks_for_a_rebuild(tmp_path, monkeypatch):
    index = SqliteIndex(tmp_path / "i", FILE)
    index.rebuild([Entry(key(1), 0, 1)], 4, 1)
    monkeypatch.setattr(sqlite_index, "_boot_id", lambda: "another boot")
    other = SqliteIndex(tmp_path / "i", FILE)
    assert not other.attach(4, 2)
    other.close()
    index.close()


def test_after_an_orderly_reboot_it_is_warm(tmp_path, monkeypatch):
    index = SqliteIndex(tmp_path / "i", FILE)
    index.rebuild([Entry(key(1), 0, 1)], 4, 1)
    index.close()
    monkeypatch.setattr(sqlite_index, "_boot_id", lambda: "another boot")
    again = SqliteIndex(tmp_path / "i", FILE)
    assert again.attach(4, 2)
    assert again.exists([key(1)]) == [True]
    again.close()


def test_b16_a_damaged_database_is_made_anew(tmp_path):
    """HF3FS_BUGS B16: a bad snapshot kept the metadata server from starting."""
    path = tmp_path / "i"
    path.write_bytes(b"[]" * 5000)
    index = SqliteIndex(path, FILE)
    assert not index.attach(4, 1)
    assert index.rebuild([Entry(key(1), 0, 1)], 4, 1) == 1
    index.close()


def test_a_folder_that_cannot_be_written_is_an_error_that_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(IndexUnavailableError, match="writable folder") as raised:
        SqliteIndex(tmp_path / "file" / "i", FILE)
    assert str(tmp_path) in str(raised.value)


def test_a_reader_in_another_process_sees_commits_and_holds_leases(tmp_path):
    """The ranks of an MLA model: one writes, the others read through the same database."""
    writer = SqliteIndex(tmp_path / "i", FILE)
    writer.rebuild([], 1, 1)
    [held] = writer.reserve([key(1)])
    writer.commit([(held, 5)])
    script = f"""
import sys
from kvcanary_plugin.tiers.hf3fs.sqlite_index import SqliteIndex
index = SqliteIndex({str(tmp_path / "i")!r}, {FILE!r})
held = index.lookup([{key(1)!r}])
print(held[0].generation, flush=True)
sys.stdin.readline()
index.release(index.lookup([{key(1)!r}]))
index.release(held)
index.close()
print("released", flush=True)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as reader:
        assert reader.stdout.readline() == "5\n"
        assert writer.reserve([key(2)]) == [None], "the reader's lease holds"
        assert reader.communicate("\n", timeout=30)[0] == "released\n"
    assert writer.reserve([key(2)])[0]
    writer.close()


def fill(index):
    for start in range(0, 100_000, 64):
        index.reserve([key(start + n) for n in range(64)])


def test_a_full_disk_is_unavailable_and_then_recovers(tmp_path):
    index = SqliteIndex(tmp_path / "i", FILE)
    index.rebuild([], 100_000, 1)
    index._tables.db.execute("PRAGMA max_page_count = 1")  # less than it has: it cannot grow
    with pytest.raises(IndexUnavailableError, match="full"):
        fill(index)
    index._tables.db.execute("PRAGMA max_page_count = 1000000")
    assert None not in index.reserve([key(n) for n in range(200_000, 200_064)])
    index.close()
