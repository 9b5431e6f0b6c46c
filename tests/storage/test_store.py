"""Page file and index together: what goes in comes out, or nothing does."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from redis_server import RedisServer
from stores import Damages, blank, capacity, key, open_file, open_store, page, same

from kvcanary_plugin.tiers.hf3fs.index import IndexUnavailableError
from kvcanary_plugin.tiers.hf3fs.layout import Layout


@pytest.fixture
def damages():
    return Damages()


@pytest.fixture
def store(tmp_path, damages):
    store = open_store(tmp_path, damages=damages)
    yield store
    store.close()


def fetch(store, *numbers):
    """What a get returns: the version of each page, or the reason why there is none."""
    targets = [blank() for _ in numbers]
    verdicts = store.get([key(n) for n in numbers], targets)
    return [
        next((v for v in range(4) if same(target, page(n, v))), "WRONG") if verdict.ok else verdict.reason
        for n, verdict, target in zip(numbers, verdicts, targets, strict=True)
    ]


def put(store, *numbers, version=0):
    return store.set([key(n) for n in numbers], [page(n, version) for n in numbers])


def corrupt(store, number, offset=100):
    """Flip a bit of a stored page in the file."""
    [place] = store.index.lookup([key(number)])
    store.index.release([place])
    where = Layout(4096, 0, store.file.slot_count).slot_offset(place.slot) + offset
    fd = os.open(store.file.path, os.O_RDWR)
    byte = os.pread(fd, 1, where)[0]
    os.pwrite(fd, bytes([byte ^ 4]), where)
    os.close(fd)
    return place


def test_set_get_exists_evict_clear(store):
    assert put(store, 1, 2, 3) == [True] * 3
    assert fetch(store, 3, 9, 1) == [0, "absent", 0]
    assert store.exists([key(1), key(9), key(3)]) == [True, False, True]
    assert store.evict([key(1), key(9)]) == 1
    assert fetch(store, 1, 2) == ["absent", 0]
    assert store.clear() == 2
    assert fetch(store, 2, 3) == ["absent", "absent"]
    assert store.index.counts().free == 8
    assert put(store, 4) == [True]


def test_a_missing_key_leaves_its_destination_alone(store):
    """HF3FS_BUGS B3: offsets were those of the hits, destinations those of all keys, and pages moved up by one."""
    put(store, 2, 3)
    targets = [blank(), blank(), blank()]
    verdicts = store.get([key(1), key(2), key(3)], targets)
    assert [verdict.ok for verdict in verdicts] == [False, True, True]
    assert same(targets[0], blank())
    assert same(targets[1], page(2))
    assert same(targets[2], page(3))


def test_an_empty_batch_is_fine(store):
    assert store.set([], []) == [] == store.get([], []) == store.exists([])


def test_a_second_set_is_a_cheap_success_and_keeps_the_first(store):
    put(store, 1)
    assert put(store, 1, version=1) == [True]
    assert fetch(store, 1) == [0]
    assert store.counts["duplicate"] == 1
    assert store.file.counters.writes == 1


def test_a_key_twice_in_one_batch(store):
    assert put(store, 1, 1) == [True, True]
    assert fetch(store, 1, 1) == [0, 0]
    assert store.index.counts().committed == 1


def test_b7_eviction_takes_whole_pages_least_recently_used_first(store):
    """HF3FS_BUGS B7: K and V were two keys, and half pages were left behind."""
    put(store, *range(8))
    fetch(store, 0)
    put(store, 8)
    assert fetch(store, 0, 1, 2, 8) == [0, "absent", 0, 0]


def test_b5_exhaustion_is_a_miss_and_loses_nothing(store):
    assert put(store, *range(12)) == [True] * 8 + [False] * 4
    assert store.counts["exhausted"] == 4
    assert fetch(store, *range(8)) == [0] * 8


def test_b11_pages_that_can_be_stored_are_stored_though_another_cannot(store, monkeypatch):
    """HF3FS_BUGS B11: one failed page counted the whole batch as failed."""
    real = store.file.write
    monkeypatch.setattr(store.file, "write", lambda batch: [None, *real(batch[1:])])
    assert put(store, 1, 2, 3) == [False, True, True]
    monkeypatch.undo()
    assert fetch(store, 1, 2, 3) == ["absent", 0, 0]
    assert store.index.counts().writing == 0
    assert put(store, 1) == [True]


def test_a_slot_that_cannot_be_written_is_left_alone(store, monkeypatch):
    real, bad = store.file.write, 3

    def write(batch):
        generations = real([w for w in batch if w.slot != bad])
        left = iter(generations)
        return [None if w.slot == bad else next(left) for w in batch]

    monkeypatch.setattr(store.file, "write", write)
    for turn in range(5):
        put(store, *range(10 * turn, 10 * turn + 8))
    assert store.index.counts().retired == 1
    assert put(store, *range(90, 97)) == [True] * 7


def test_a_write_that_raises_gives_its_slots_back(store, monkeypatch):
    def write(batch):
        raise ValueError("of another size")

    monkeypatch.setattr(store.file, "write", write)
    with pytest.raises(ValueError, match="another size"):
        put(store, 1, 2)
    assert store.index.counts().free == 8


def test_a_flipped_bit_is_a_miss_reported_once_and_stored_anew(store, damages):
    put(store, 1, 2)
    place = corrupt(store, 1)
    assert fetch(store, 1, 2) == ["digest", 0]
    assert [(d.number, d.reason, d.place.slot) for d in damages] == [(0, "digest", place.slot)]
    assert fetch(store, 1) == ["absent"]
    assert put(store, 1, version=1) == [True]
    assert fetch(store, 1, 2) == [1, 0]
    assert len(damages) == 1


def test_a_stale_index_never_serves_another_page(store, damages):
    """HF3FS_BUGS A1: an old snapshot of the metadata named pages that held other keys since."""
    put(store, *range(8))
    entries = [place for place in store.index.lookup([key(n) for n in range(8)]) if place]
    store.index.release(entries)
    store.evict(None)
    put(store, *range(20, 28))
    store.index.rebuild(entries, 8, store.file.epoch)  # the old snapshot comes back
    assert set(fetch(store, *range(8))) <= {"key", "generation"}
    assert len(damages) == 8
    assert fetch(store, 0) == ["absent"], "and is believed once only"


def test_a2_a_page_both_mapped_and_free_is_never_served_wrong(store):
    """HF3FS_BUGS A2: after a torn snapshot a page was handed out while a key still named it."""
    put(store, 1)
    [place] = store.index.lookup([key(1)])
    store.index.release([place])
    store.index.rebuild([], 8, store.file.epoch)  # everything is free ...
    store.index.rebuild([place], 8, store.file.epoch)
    store.index._tables.free([])
    store.index._tables.db.execute("INSERT INTO free VALUES (?)", (place.slot,))  # ... and the page is mapped too
    put(store, 2)
    assert fetch(store, 1)[0] != "WRONG"
    assert fetch(store, 2)[0] != "WRONG"


def test_a3_reuse_between_lookup_and_read_is_a_miss_without_a_report(store, damages, monkeypatch):
    """HF3FS_BUGS A3. A lease prevents it; where one ran out or everything was cleared, the record tells."""
    put(store, 1)
    real = store.index.lookup

    def lookup(keys):
        places = real(keys)
        store.evict(None)
        for _ in range(2):
            put(store, *range(50, 58))
            store.evict(None)
        put(store, *range(60, 68))
        return places

    monkeypatch.setattr(store.index, "lookup", lookup)
    assert fetch(store, 1) == ["raced"]
    assert damages == []


def test_warm_restart_serves_verified_pages(tmp_path):
    store = open_store(tmp_path)
    put(store, 1, 2)
    store.close()
    again = open_store(tmp_path)
    assert fetch(again, 1, 2, 3) == [0, 0, "absent"]
    again.close()


def test_restart_without_the_index_rebuilds_it(tmp_path):
    store = open_store(tmp_path)
    put(store, 1, 2)
    store.close()
    for path in tmp_path.glob("pages.index*"):
        path.unlink()
    again = open_store(tmp_path)
    assert fetch(again, 1, 2) == [0, 0]
    assert again.index.counts().free == 6
    again.close()


def test_a6_a_file_made_anew_is_not_believed_to_hold_old_pages(tmp_path):
    store = open_store(tmp_path)
    put(store, 1)
    store.close()
    (tmp_path / "pages").unlink()
    again = open_store(tmp_path)
    assert fetch(again, 1) == ["absent"]
    again.close()


def test_a_file_written_behind_the_index_s_back_is_scanned(tmp_path):
    store = open_store(tmp_path)
    put(store, 1, 2)
    store.close()
    os.rename(tmp_path / "pages.index", tmp_path / "old.index")
    other = open_store(tmp_path)
    other.evict(None)
    put(other, *range(10, 18))
    other.close()
    for path in tmp_path.glob("pages.index*"):
        path.unlink()
    os.rename(tmp_path / "old.index", tmp_path / "pages.index")
    again = open_store(tmp_path, damages=(damages := Damages()))
    assert fetch(again, 1, 10) == ["absent", 0]
    assert damages == []
    again.close()


def test_index_unavailable_is_a_miss(store, monkeypatch):
    put(store, 1)

    def fail(*arguments, **options):
        raise IndexUnavailableError("away")

    for name in ("reserve", "lookup", "exists", "evict"):
        monkeypatch.setattr(store.index, name, fail)
    assert fetch(store, 1) == ["absent"]
    assert put(store, 2) == [False]
    assert store.exists([key(1)]) == [False]
    assert store.evict(None) == 0
    assert store.counts["index-unavailable"] == 2


def test_close_waits_for_calls_and_later_ones_are_misses(store, monkeypatch):
    real, entered, leave = store.file.write, threading.Event(), threading.Event()

    def slow(batch):
        entered.set()
        leave.wait(10)
        return real(batch)

    monkeypatch.setattr(store.file, "write", slow)
    results = []
    writer = threading.Thread(target=lambda: results.append(put(store, 1)))
    writer.start()
    entered.wait(10)
    closer = threading.Thread(target=store.close)
    closer.start()
    time.sleep(0.1)
    assert closer.is_alive(), "close waits"
    assert fetch(store, 1) == ["absent"]
    leave.set()
    writer.join(10)
    closer.join(10)
    assert results == [[True]]
    store.close()
    assert put(store, 2) == [False]


def test_a_read_only_store_sees_what_the_writer_commits(tmp_path, store):
    reader_file = open_file(tmp_path, read_only=True, create=False)
    index = type(store.index)(store.index.path, store.index.file)
    reader = type(store)(reader_file, index, on_damage=(damages := Damages()))
    put(store, 1)
    assert fetch(reader, 1) == [0]
    store.evict(None)
    assert fetch(reader, 1) == ["absent"]
    put(store, *range(10, 18))
    assert fetch(reader, *range(10, 18)) == [0] * 8
    assert put(reader, 99) == [False]
    assert damages == []
    reader.close()


@pytest.fixture
def redis_server(tmp_path):
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis")
    yield server
    server.stop()


def test_two_hosts_share_pages_through_redis(tmp_path, redis_server):
    one = open_store(tmp_path, redis_url=redis_server.url, name="one")
    other = open_store(tmp_path, redis_url=redis_server.url, name="other", damages=(damages := Damages()))
    put(one, 1, 2)
    assert fetch(other, 1, 2) == [0, 0]
    assert put(other, 1) == [True]
    assert other.file.counters.writes == 0
    corrupt(one, 2)
    assert fetch(other, 1, 2) == [0, "digest"]
    assert damages.reasons == ["digest"]
    assert fetch(one, 2) == ["absent"]
    one.close()
    assert fetch(other, 1) == [0], "a page outlives the process that wrote it"
    os.unlink(tmp_path / "one")
    other.close()


def test_pages_in_a_file_that_is_gone_are_forgotten(tmp_path, redis_server):
    one = open_store(tmp_path, redis_url=redis_server.url, name="one")
    put(one, 1)
    one.close()
    os.unlink(tmp_path / "one")
    other = open_store(tmp_path, redis_url=redis_server.url, name="other")
    other._others._open_file = lambda path: None
    assert fetch(other, 1) == ["absent"]
    assert put(other, 1) == [True]
    assert fetch(other, 1) == [0]
    other.close()


def test_b4_redis_comes_back_empty_and_the_index_is_made_anew(tmp_path, redis_server):
    store = open_store(tmp_path, redis_url=redis_server.url)
    put(store, 1, 2)
    redis_server.stop()
    assert fetch(store, 1) == ["absent"]
    assert put(store, 3) == [False]
    redis_server.start()
    time.sleep(1.1)
    assert put(store, 3) == [True]
    assert fetch(store, 1, 2, 3) == [0, 0, 0]
    store.close()


WRITER = """
import sys
sys.path.insert(0, {folder!r})
from pathlib import Path
from stores import key, open_store, page
store = open_store(Path(sys.argv[1]))
number = int(sys.argv[2])
print("up", flush=True)
while True:
    batch = [(number * 7 + i * 3) % 40 for i in range(5)]
    store.set([key(n) for n in batch], [page(n) for n in batch])
    if number % 11 == 0:
        store.evict([key(number % 40)])
    number += 1
"""


def test_kill_9_of_a_writer_never_leaves_a_wrong_page(tmp_path):
    """Killed at random points; the next store must serve each page right or not at all, and report no damage."""
    script = WRITER.format(folder=os.path.dirname(__file__))
    chance = random.Random(1)
    for turn in range(8):
        command = [sys.executable, "-c", script, str(tmp_path), str(turn * 1000)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout.readline() == "up\n"
            time.sleep(chance.uniform(0.0, 0.15))
            writer.send_signal(signal.SIGKILL)
        damages = Damages()
        store = open_store(tmp_path, damages=damages)
        assert set(fetch(store, *range(40))) <= {0, "absent"}
        assert damages == []
        counts = store.index.counts()
        assert counts.writing == 0
        assert counts.committed + counts.free == 8
        store.close()


SOAK_S = float(os.environ.get("KVCANARY_SOAK_S", "5"))


@pytest.mark.timeout(SOAK_S + 120)
@pytest.mark.parametrize("hosts", [1, 2], ids=["sqlite", "two hosts on redis"])
def test_16_threads_of_mixed_calls_never_see_a_wrong_page(tmp_path, hosts, request):
    """A small file, so that eviction is constant. KVCANARY_SOAK_S=300 makes it five minutes."""
    damages = Damages()
    url = request.getfixturevalue("redis_server").url if hosts > 1 else None
    stores = [
        open_store(tmp_path, redis_url=url, name=f"pages{n}", damages=damages, capacity_bytes=capacity(64))
        for n in range(hosts)
    ]
    end, errors, hits = time.monotonic() + SOAK_S, [], [0] * 16

    def work(thread):
        store, chance = stores[thread % hosts], random.Random(thread)
        try:
            while time.monotonic() < end and not errors:
                numbers = [chance.randrange(200) for _ in range(chance.randrange(1, 9))]
                action = chance.random()
                if action < 0.45:
                    put(store, *numbers, version=chance.randrange(4))
                elif action < 0.93:
                    got = fetch(store, *numbers)
                    assert "WRONG" not in got, (numbers, got)
                    hits[thread] += sum(isinstance(version, int) for version in got)
                elif action < 0.99:
                    store.evict([key(n) for n in numbers])
                else:
                    store.clear()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert damages == [], damages.reasons
    assert sum(hits) > 20 * SOAK_S
    for store in stores:
        counts = store.index.counts()
        assert counts.writing == 0
        assert counts.committed + counts.free + counts.retired == 64
        print(f"{sum(hits)} pages verified; {dict(store.counts)}")
        store.close()
