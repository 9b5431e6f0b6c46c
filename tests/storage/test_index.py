"""One contract, two implementations."""

import threading
import uuid

import pytest
from redis_server import RedisServer

from kvcanary_plugin.tiers.hf3fs.index import Entry, Held, IndexLostError, IndexUnavailableError, Reservation
from kvcanary_plugin.tiers.hf3fs.redis_index import RedisIndex
from kvcanary_plugin.tiers.hf3fs.sqlite_index import SqliteIndex

FILE = uuid.UUID(int=1).hex


def key(number):
    return number.to_bytes(16, "big")


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", "redis"])
def open_index(request, tmp_path):
    """Opens the same index as often as it is called, as several processes would."""
    opened = []
    namespace = uuid.uuid4().hex

    def open_one(file=FILE, **options):
        if request.param == "sqlite":
            index = SqliteIndex(tmp_path / "index.sqlite", file, **options)
        else:
            url = request.getfixturevalue("redis_server").url
            index = RedisIndex(url, file, path=f"/3fs/{file}", namespace=namespace, **options)
        opened.append(index)
        return index

    yield open_one
    for index in opened:
        index.close()


@pytest.fixture
def index(open_index):
    """Four slots."""
    index = open_index()
    assert not index.attach(4, 1)
    assert index.rebuild([], 4, 1) == 0
    return index


def store(index, *numbers):
    """Reserve and commit; the generation is 100 + number."""
    reserved = index.reserve([key(n) for n in numbers])
    assert all(isinstance(r, Reservation) for r in reserved), reserved
    assert all(index.commit([(r, 100 + n) for r, n in zip(reserved, numbers, strict=True)]))
    return [r.slot for r in reserved]


def test_a_committed_key_is_found_where_it_was_put(index):
    slots = store(index, 1, 2)
    places = index.lookup([key(2), key(3), key(1)])
    assert [p and (p.key, p.slot, p.generation, p.file) for p in places] == [
        (key(2), slots[1], 102, FILE),
        None,
        (key(1), slots[0], 101, FILE),
    ]
    assert index.exists([key(1), key(3), key(2)]) == [True, False, True]


def test_nothing_is_visible_before_commit(index):
    [reserved] = index.reserve([key(1)])
    assert index.lookup([key(1)]) == [None]
    assert index.exists([key(1)]) == [False]
    assert index.commit([(reserved, 7)]) == [True]
    assert index.exists([key(1)]) == [True]


def test_an_empty_batch_is_fine(index):
    assert index.reserve([]) == [] == index.lookup([]) == index.exists([]) == index.commit([])
    index.release([])
    index.abort([])
    index.withdraw([], retire=False)
    assert index.evict([]) == []


def test_large_generations_survive(index):
    [reserved] = index.reserve([key(1)])
    assert index.commit([(reserved, 2**63 - 1)]) == [True]
    assert index.lookup([key(1)])[0].generation == 2**63 - 1


def test_b6_duplicate_reserve_takes_one_page(index):
    """HF3FS_BUGS B6: the same key reserved twice before commit used to leak a page for ever."""
    first = index.reserve([key(1)])
    assert index.reserve([key(1)]) == [Held.WRITING]
    assert index.commit([(first[0], 1)]) == [True]
    assert index.reserve([key(1)]) == [Held.COMMITTED]
    assert (index.counts().committed, index.counts().writing, index.counts().free) == (1, 0, 3)


def test_b6_a_key_twice_in_one_batch_takes_one_page(index):
    first, second = index.reserve([key(1), key(1)])
    assert isinstance(first, Reservation)
    assert second is Held.WRITING
    assert index.counts().writing == 1


def test_b5_exhaustion_is_none_and_loses_nothing(index):
    """HF3FS_BUGS B5: with every page reserved and none confirmed, the server raised and lost pages."""
    held = index.reserve([key(n) for n in range(4)])
    assert len({r.slot for r in held}) == 4
    assert index.reserve([key(9)]) == [None]
    index.abort(held)
    assert index.counts().free == 4
    assert None not in index.reserve([key(n) for n in range(10, 14)])


def test_a_batch_larger_than_the_file_gets_what_there_is(index):
    outcomes = index.reserve([key(n) for n in range(6)])
    assert [isinstance(o, Reservation) for o in outcomes] == [True] * 4 + [False] * 2


def test_the_least_recently_used_page_goes_first(index):
    slots = store(index, 1, 2, 3, 4)
    index.release(index.lookup([key(1)]))
    index.exists([key(2)])
    [reserved] = index.reserve([key(5)])
    assert reserved.slot == slots[2]
    assert index.exists([key(n) for n in range(1, 5)]) == [True, True, False, True]


def test_b7_a_batch_does_not_evict_its_own_hits(index):
    store(index, 1, 2, 3, 4)
    outcomes = index.reserve([key(5), key(1), key(6)])
    assert outcomes[1] is Held.COMMITTED
    assert index.exists([key(1)]) == [True]
    assert index.exists([key(2), key(3)]) == [False, False]


def test_a3_a_leased_page_is_not_reused(index):
    """HF3FS_BUGS A3: eviction handed a page to a writer between the lookup and the read."""
    slots = store(index, 1)
    leased = index.lookup([key(1)])
    store(index, 2, 3, 4)
    taken = {r.slot for r in index.reserve([key(n) for n in range(10, 14)]) if r}
    assert len(taken) == 3
    assert slots[0] not in taken
    index.release(leased)
    assert index.reserve([key(20)])[0].slot == slots[0]


def test_two_readers_two_leases(index):
    store(index, 1, 2, 3, 4)
    one, other = index.lookup([key(1)]), index.lookup([key(1)])
    index.release(one)
    assert len([r for r in index.reserve([key(n) for n in range(10, 14)]) if r]) == 3
    index.release(other)
    assert None not in index.reserve([key(20)])


def test_a_key_looked_up_twice_at_once_is_released_once(index):
    store(index, 1, 2, 3, 4)
    other = index.lookup([key(1)])
    index.release(index.lookup([key(1), key(1)]))
    assert len([r for r in index.reserve([key(n) for n in range(10, 14)]) if r]) == 3
    index.release(other)
    assert None not in index.reserve([key(20)])


def test_a_lease_runs_out(open_index):
    index = open_index(lease_s=0.0)
    index.rebuild([], 1, 1)
    store(index, 1)
    late = index.lookup([key(1)])
    [reserved] = index.reserve([key(2)])
    assert reserved.slot == late[0].slot
    assert not index.is_current(late[0])
    index.release(late)  # and does no harm to whoever has the slot now
    assert index.commit([(reserved, 1)]) == [True]


def test_a_late_release_does_not_end_another_lease(open_index):
    index = open_index(lease_s=0.05)
    index.rebuild([], 1, 1)
    store(index, 1)
    late = index.lookup([key(1)])
    threading.Event().wait(0.1)
    index.release(index.lookup([key(1)]))
    held = index.lookup([key(1)])
    index.release(late)
    assert index.reserve([key(2)]) == [None]
    index.release(held)


def test_abort_frees_the_slot_once(index):
    held = index.reserve([key(1)])
    index.abort(held)
    index.abort(held)
    assert index.counts().free == 4
    slots = {r.slot for r in index.reserve([key(n) for n in range(4)])}
    assert len(slots) == 4
    index.abort(held)  # its slot is somebody else's now
    assert index.counts().writing == 4


def test_a_commit_after_abort_is_refused(index):
    held = index.reserve([key(1)])
    index.abort(held)
    assert index.commit([(held[0], 1)]) == [False]
    assert index.exists([key(1)]) == [False]


def test_a_hung_writer_loses_its_key_but_keeps_its_slot(open_index):
    index = open_index(write_deadline_s=0.0)
    index.rebuild([], 2, 1)
    hung = index.reserve([key(1)])
    other = index.reserve([key(1)])
    assert isinstance(other[0], Reservation)
    assert other[0].slot != hung[0].slot
    assert index.commit([(other[0], 2)]) == [True]
    assert index.commit([(hung[0], 1)]) == [False]
    assert index.lookup([key(1)])[0].generation == 2
    index.abort(hung)
    assert index.exists([key(1)]) == [True]
    assert index.counts().free == 1


def test_withdraw_drops_only_what_was_looked_up(index):
    store(index, 1)
    old = index.lookup([key(1)])[0]
    index.withdraw([old], retire=False)
    assert index.exists([key(1)]) == [False]
    store(index, 1)
    [newer] = index.reserve([key(2)])
    assert index.commit([(newer, 102)]) == [True]
    changed = index.lookup([key(1)])[0]
    index.withdraw([type(old)(old.key, old.file, changed.slot, 5)], retire=False)  # another generation
    assert index.exists([key(1)]) == [True]
    assert index.is_current(changed)


def test_a_retired_slot_is_not_used_again(index):
    slots = store(index, 1)
    index.withdraw(index.lookup([key(1)]), retire=True)
    held = index.reserve([key(n) for n in range(10, 14)])
    assert slots[0] not in {r.slot for r in held if r}
    assert held[3] is None
    index.retire(held[:1])
    index.abort(held[1:3])
    assert (index.counts().retired, index.counts().free) == (2, 2)


def test_evict_gives_slots_to_the_caller_first(index):
    slots = store(index, 1, 2)
    taken = index.evict([key(1), key(7), key(1)])
    assert [r.slot for r in taken] == slots[:1]
    assert index.exists([key(1), key(2)]) == [False, True]
    assert index.counts().free == 2
    index.abort(taken)
    assert index.counts().free == 3


def test_clear_forgets_all_but_what_is_being_written(index):
    store(index, 1, 2)
    index.lookup([key(1)])
    held = index.reserve([key(3)])
    taken = index.evict(None)
    assert len(taken) == 2
    assert index.exists([key(1), key(2)]) == [False, False]
    index.abort(taken)
    assert index.commit([(held[0], 1)]) == [True]
    assert (index.counts().committed, index.counts().free) == (1, 3)


def test_rebuild_from_a_scan(index):
    store(index, 1, 2)
    entries = [Entry(key(5), 3, 50), Entry(key(6), 1, 60), Entry(key(5), 0, 40)]
    assert index.rebuild(entries, 4, 2) == 2
    assert index.exists([key(1), key(2)]) == [False, False]
    assert [(p.slot, p.generation) for p in index.lookup([key(5), key(6)])] == [(3, 50), (1, 60)]
    assert {r.slot for r in index.reserve([key(7), key(8)])} == {0, 2}


def test_warm_restart(open_index):
    index = open_index()
    index.rebuild([], 4, 1)
    store(index, 1, 2)
    index.lookup([key(1)])
    index.reserve([key(3)])
    index.close()
    again = open_index()
    assert again.attach(4, 2)
    assert again.lookup([key(2)])[0].generation == 102
    assert again.counts().free == 2, "what was being written is free again"
    assert again.reserve([key(3)])[0]


@pytest.mark.parametrize(
    ("slot_count", "epoch"), [(5, 2), (4, 3), (4, 0)], ids=["another size", "written meanwhile", "older file"]
)
def test_a7_an_index_of_another_life_of_the_file_is_refused(open_index, slot_count, epoch):
    """HF3FS_BUGS A7: another number of pages only warned, and old page numbers were used on."""
    index = open_index()
    index.rebuild([], 4, 1)
    store(index, 1)
    index.close()
    assert not open_index().attach(slot_count, epoch)


def test_a6_an_index_of_another_file_is_refused(open_index):
    """HF3FS_BUGS A6: the data file was made anew and the metadata still knew its keys."""
    index = open_index()
    index.rebuild([], 4, 1)
    store(index, 1)
    index.close()
    other = open_index(file=uuid.UUID(int=2).hex)
    assert not other.attach(4, 2)
    other.rebuild([], 4, 2)
    assert other.counts().committed == 0


def test_an_index_that_never_heard_of_the_file_says_so(open_index):
    with pytest.raises(IndexLostError):
        open_index().reserve([key(1)])


def test_close_twice_and_use_after(index):
    index.close()
    index.close()
    with pytest.raises(IndexUnavailableError):
        index.exists([key(1)])


def test_no_slot_has_two_owners_under_threads(open_index):
    """Reserve, commit, abort, look up and evict from 8 threads; each slot is owned by at most one of them at a time."""
    index = open_index()
    index.rebuild([], 16, 1)
    owners, errors, lock = {}, [], threading.Lock()

    def work(seed):
        try:
            for turn in range(60):
                held = [r for r in index.reserve([key((seed * 7 + turn * 3 + n) % 40) for n in range(4)]) if r]
                held = [r for r in held if isinstance(r, Reservation)]
                with lock:
                    for r in held:
                        assert owners.setdefault(r.slot, seed) == seed, f"slot {r.slot} has two owners"
                        owners[r.slot] = seed
                with lock:
                    for r in held:
                        del owners[r.slot]
                if turn % 3:
                    index.commit([(r, turn + 1) for r in held])
                else:
                    index.abort(held)
                index.release([p for p in index.lookup([key(n) for n in range(0, 40, 5)]) if p])
                if turn % 10 == 9:
                    index.abort(index.evict([key(turn % 40)]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    counts = index.counts()
    assert counts.writing == 0
    assert counts.committed + counts.free == 16
