"""What only the Redis index has to withstand: a server that is away, slow, or comes back empty, and several hosts."""

import builtins
import time
import uuid

import pytest
from redis_server import RedisServer

from kvcanary_plugin.errors import ConfigError
from kvcanary_plugin.tiers.hf3fs.index import Entry, Held, IndexLostError, IndexUnavailableError
from kvcanary_plugin.tiers.hf3fs.redis_index import RedisIndex

ONE, OTHER = uuid.UUID(int=0xA1).hex, uuid.UUID(int=0xB2).hex


def key(number):
    return number.to_bytes(16, "big")


@pytest.fixture
def server(tmp_path):
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def hosts(server):
    """Two hosts, a page file each, two slots each."""
    indices = [RedisIndex(server.url, file, path=f"/3fs/{file}", write_deadline_s=60) for file in (ONE, OTHER)]
    for index in indices:
        index.rebuild([], 2, 1)
    yield indices
    for index in indices:
        index.close()


def store(index, *numbers):
    held = index.reserve([key(n) for n in numbers])
    assert all(index.commit([(r, n) for r, n in zip(held, numbers, strict=True)]))


def test_a_page_of_one_host_is_found_by_the_other(hosts):
    one, other = hosts
    store(one, 1)
    [place] = other.lookup([key(1)])
    assert (place.file, place.generation) == (ONE, 1)
    assert other.path_of(place.file) == f"/3fs/{ONE}"
    assert other.reserve([key(1)]) == [Held.COMMITTED], "and not stored twice"


def test_a_reader_on_another_host_protects_the_page(hosts):
    one, other = hosts
    store(one, 1)
    leased = other.lookup([key(1)])
    store(one, 2)
    assert [r is None for r in one.reserve([key(3), key(4)])] == [False, True]
    other.release(leased)
    assert one.reserve([key(5)])[0]


def test_each_host_evicts_from_its_own_file(hosts):
    one, other = hosts
    store(one, 1, 2)
    store(other, 3, 4)
    store(one, 5)
    assert one.exists([key(n) for n in range(1, 6)]) == [False, True, True, True, True]
    assert len(other.evict(None)) == 2
    assert one.exists([key(n) for n in range(1, 6)]) == [False, True, False, False, True]


def test_two_hosts_reserve_one_key(hosts):
    one, other = hosts
    assert one.reserve([key(1)])[0]
    assert other.reserve([key(1)]) == [Held.WRITING]


def test_the_key_of_a_host_that_died_while_writing_is_not_lost(server):
    one = RedisIndex(server.url, ONE, path="/3fs/1", write_deadline_s=0.05)
    other = RedisIndex(server.url, OTHER, path="/3fs/2", write_deadline_s=0.05)
    one.rebuild([], 2, 1)
    other.rebuild([], 2, 1)
    dead = one.reserve([key(1)])
    time.sleep(0.1)
    store(other, 1)
    assert one.commit([(dead[0], 9)]) == [False]
    assert one.lookup([key(1)])[0].file == OTHER
    assert one.attach(2, 2)
    assert one.counts().free == 2
    assert one.lookup([key(1)])[0].file == OTHER
    one.close()
    other.close()


def test_a_reservation_whose_reply_was_lost_comes_back_in_the_end(server):
    index = RedisIndex(server.url, ONE, path="/3fs/1", write_deadline_s=0.02)
    index.rebuild([], 1, 1)
    index.reserve([key(1)])
    assert index.reserve([key(2)]) == [None]
    time.sleep(0.3)
    assert index.reserve([key(2)])[0]
    index.close()


def test_rebuild_leaves_what_another_host_holds(hosts):
    one, other = hosts
    store(other, 1)
    assert one.rebuild([Entry(key(1), 1, 70), Entry(key(2), 0, 71)], 2, 2) == 1
    assert one.lookup([key(1)])[0].file == OTHER
    assert one.counts().free == 1


def test_rebuild_of_many_pages(hosts):
    one, _ = hosts
    entries = [Entry(key(n), 2 * n, n) for n in range(1, 2500)]
    assert one.rebuild(entries, 6000, 2) == len(entries)
    assert one.counts().free == 6000 - len(entries)
    assert one.rebuild(entries[:10], 6000, 3) == 10
    assert one.exists([key(1), key(2000)]) == [True, False]


def test_a_new_file_at_the_same_path_replaces_the_old_one(server):
    old = RedisIndex(server.url, ONE, path="/3fs/page.bin")
    old.rebuild([], 2, 1)
    store(old, 1)
    new = RedisIndex(server.url, OTHER, path="/3fs/page.bin")
    assert not new.attach(2, 1)
    new.rebuild([], 2, 1)
    assert new.exists([key(1)]) == [False]
    with pytest.raises(IndexLostError):
        old.reserve([key(2)])
    old.close()
    new.close()


def test_a_writer_that_was_taken_over_cannot_reserve(server):
    old = RedisIndex(server.url, ONE, path="/3fs/1")
    old.rebuild([], 2, 1)
    held = old.reserve([key(1)])
    new = RedisIndex(server.url, ONE, path="/3fs/1")
    assert new.attach(2, 2)
    for action in (lambda: old.reserve([key(2)]), lambda: old.commit([(held[0], 1)]), lambda: old.evict(None)):
        with pytest.raises(IndexLostError):
            action()
    old.close()
    new.close()


def test_namespaces_do_not_mix(server):
    one = RedisIndex(server.url, ONE, path="/3fs/1", namespace="a")
    other = RedisIndex(server.url, OTHER, path="/3fs/2", namespace="b")
    one.rebuild([], 2, 1)
    other.rebuild([], 2, 1)
    store(one, 1)
    assert other.exists([key(1)]) == [False]
    one.close()
    other.close()


def test_no_server_is_a_clear_error_without_the_password():
    with pytest.raises(ConfigError) as raised:
        RedisIndex("redis://user:geheim@127.0.0.1:1/0", ONE, timeout_s=0.5)
    assert "no Redis answers at redis://127.0.0.1:1/0" in str(raised.value)
    assert "geheim" not in str(raised.value)


def test_an_address_that_is_none_is_a_clear_error():
    with pytest.raises(ConfigError, match="no Redis answers"):
        RedisIndex("http://127.0.0.1:1", ONE)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch):
    real = builtins.__import__

    def fake(name, *args, **kwargs):
        if name == "redis":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)
    with pytest.raises(ConfigError, match="pip install redis"):
        RedisIndex("redis://127.0.0.1:1/0", ONE)


def test_b4_a_server_that_comes_back_empty_says_lost_and_is_rebuilt(hosts, server):
    """HF3FS_BUGS B4: after a restart of the metadata server every call failed for ever."""
    one, _ = hosts
    store(one, 1)
    server.stop()
    with pytest.raises(IndexUnavailableError, match="does not answer"):
        one.exists([key(1)])
    server.start()
    time.sleep(1.1)
    assert one.exists([key(1)]) == [False], "reconnected by itself"
    with pytest.raises(IndexLostError):
        one.reserve([key(1)])
    one.rebuild([Entry(key(1), 0, 1)], 2, 1)
    assert one.exists([key(1)]) == [True]


def test_b15_a_hung_server_costs_a_timeout_once(server):
    """HF3FS_BUGS B15: requests without a timeout hung the I/O threads for ever."""
    index = RedisIndex(server.url, ONE, path="/3fs/1", timeout_s=0.3)
    index.rebuild([], 2, 1)
    server.pause()
    try:
        start = time.monotonic()
        for _ in range(50):
            with pytest.raises(IndexUnavailableError):
                index.exists([key(1)])
        assert time.monotonic() - start < 5
    finally:
        server.resume()
    time.sleep(1.1)
    assert index.exists([key(1)]) == [False]
    index.close()
