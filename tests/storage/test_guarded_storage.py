"""The guard around other backends: SGLang's own file and hf3fs ones, and some that misbehave."""

import atexit
import time

import pytest
import torch
from host_pools import (
    PAGE_SIZE,
    fill,
    indices,
    make_config,
    make_mha,
    make_mla,
    make_paged,
    operation,
    page_bytes,
    same_bytes,
    transfer,
    wipe,
)
from redis_server import RedisServer
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorage, PoolName
from sglang.srt.mem_cache.storage.hf3fs.mini_3fs_metadata_server import Hf3fsLocalMetadataClient
from sglang.srt.mem_cache.storage.hf3fs.storage_hf3fs import HiCacheHF3FS

from kvcanary_plugin.errors import ConfigError
from kvcanary_plugin.tiers import digest_store, finding, scope
from kvcanary_plugin.tiers.digest_store import MAX_VERSIONS, SqliteDigests, Version
from kvcanary_plugin.tiers.guarded_storage import as_list, guard_storage
from kvcanary_plugin.tiers.hf3fs.backend import VerifiedHF3FS

KEYS = [f"{n:064x}" for n in range(1, 9)]
# The mock client of the stock backend
pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")


@pytest.fixture
def found():
    class Listener:
        def __init__(self):
            self.events = []

        def count(self, check, tier, pool):
            assert tier == "storage"

        def event(self, name, fields):
            self.events.append(fields)

    listener = Listener()
    finding.listen(listener)
    finding._seen.clear()
    yield listener.events
    finding.listen(None)


@pytest.fixture
def guard(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "files"))
    opened = []

    def make(backend=None, pool=None, *, name="file", extra=None, **changes):
        config = make_config(dict(extra or {}), **changes)
        guarded = guard_storage(lambda: backend if backend is not None else HiCacheFile(config), name, config)
        opened.append(guarded)
        if pool is not None:
            guarded.register_mem_pool_host(pool)
        return guarded

    yield make
    for guarded in opened:
        guarded.close()


def flat(pool, *pages):
    return [pool.get_data_page(page * PAGE_SIZE) for page in pages]


def targets(pool, count):
    return [pool.get_dummy_flat_data_page() for _ in range(count)]


def missing(results):
    return [result is None for result in results]


class Memory(HiCacheStorage):
    """A v1 backend in memory, with a fault for tests to set: ``spoil(number, bytes)`` changes what comes back."""

    def __init__(self):
        self.pages, self.spoil, self.fails = {}, lambda number, data: data, False

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        if self.fails:
            raise RuntimeError("metadata server: 404")
        for n, key in enumerate(keys):
            self.pages.setdefault(key, self._cut(host_indices, n).clone())
        return [True] * len(keys)

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        if self.fails:
            raise RuntimeError("metadata server: 404")
        results = []
        for n, key in enumerate(keys):
            data = self.pages.get(key)
            results.append(data is not None)
            if data is not None:
                self._cut(host_indices, n).copy_(self.spoil(n, data.clone()))
        return results

    def _cut(self, host_indices, n):
        first = int(host_indices[n * PAGE_SIZE])
        return self.mem_pool_host.kv_buffer[:, first : first + PAGE_SIZE]

    def exists(self, key):
        return key in self.pages

    def get(self, key, target_location=None, target_sizes=None):
        return None

    def batch_get(self, keys, target_locations=None, target_sizes=None):
        return None

    def set(self, key, value=None, target_location=None, target_sizes=None):
        return False

    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None):
        return False

    def only_here(self):
        return 42


def test_the_file_backend_clean(guard, found):
    pool = make_mha("layer_first")
    guarded = guard(pool=pool)
    fill(pool)
    assert guarded.batch_set(KEYS[:3], flat(pool, 0, 1, 2))
    assert guarded.set(KEYS[3], flat(pool, 3)[0])
    assert guarded.batch_exists(KEYS[:5]) == 4
    got = guarded.batch_get(KEYS[:5], targets(pool, 5))
    assert missing(got) == [False] * 4 + [True]
    assert all(same_bytes(a, b) for a, b in zip(got, flat(pool, 0, 1, 2, 3), strict=False))
    assert same_bytes(guarded.get(KEYS[1], targets(pool, 1)[0]), got[1])
    assert found == []


@pytest.mark.parametrize("damage", ["flip", "zeros", "swap", "other length"])
def test_the_file_backend_damaged(guard, found, tmp_path, damage):
    pool = make_mha("layer_first")
    guarded = guard(pool=pool)
    fill(pool)
    guarded.batch_set(KEYS[:4], flat(pool, 0, 1, 2, 3))
    files = sorted((tmp_path / "files").glob("*.bin"))
    data = files[1].read_bytes()
    if damage == "flip":
        files[1].write_bytes(data[:77] + bytes([data[77] ^ 32]) + data[78:])
    elif damage == "zeros":
        files[1].write_bytes(bytes(len(data)))
    elif damage == "swap":
        files[1].write_bytes(files[2].read_bytes())
    else:
        files[1].write_bytes(data[:-8])
    got = guarded.batch_get(KEYS[:4], targets(pool, 4))
    if damage == "other length":  # the backend raises, and nothing is handed out
        assert missing(got) == [True] * 4
    else:
        assert missing(got) == [False, True, True, True], "the page and all after it"
        assert [(event["check"], event["kind"], event["page_key"]) for event in found] == [
            ("content", "digest", KEYS[1])
        ]
        assert 'backend "file"' in found[0]["place"]
    assert missing(guarded.batch_get(KEYS[:1], targets(pool, 1))) == [False]


def test_a_restart_still_knows_the_digests(guard, found):
    pool = make_mha("layer_first")
    fill(pool)
    first = guard(pool=pool)
    first.batch_set(KEYS[:2], flat(pool, 0, 1))
    first.close()
    assert missing(guard(pool=pool).batch_get(KEYS[:2], targets(pool, 2))) == [False, False]
    assert found == []


def test_recomputed_bytes_of_the_same_tokens_are_no_damage(guard, found):
    """The backend keeps the first version; KV computed in another batch has other last bits. Both were stored."""
    pool = make_mha("layer_first")
    guarded = guard(pool=pool)
    fill(pool)
    guarded.batch_set(KEYS[:1], flat(pool, 0))
    guarded.batch_set(KEYS[:1], flat(pool, 1))
    guarded.batch_set(KEYS[:1], flat(pool, 2))
    [got] = guarded.batch_get(KEYS[:1], targets(pool, 1))
    assert same_bytes(got, flat(pool, 0)[0])
    assert found == []


def test_a_page_nobody_vouches_for_is_missing_but_not_damaged(guard, found, tmp_path):
    """Stored before the guard was there. Once it is stored again it may still be the old one that comes back."""
    pool = make_mha("layer_first")
    fill(pool)
    guarded = guard(pool=pool)
    guarded.backend.batch_set(KEYS[:1], flat(pool, 0))
    assert guarded.batch_get(KEYS[:1], targets(pool, 1)) == [None]
    assert guarded.batch_set(KEYS[:1], flat(pool, 1))
    assert guarded.batch_get(KEYS[:1], targets(pool, 1)) == [None]
    assert found == []
    next((tmp_path / "files").glob("*.bin")).unlink()
    assert guarded.batch_set(KEYS[:1], flat(pool, 1))
    assert missing(guarded.batch_get(KEYS[:1], targets(pool, 1))) == [False]
    path = next((tmp_path / "files").glob("*.bin"))
    path.write_bytes(bytes(path.stat().st_size))
    assert guarded.batch_get(KEYS[:1], targets(pool, 1)) == [None]
    assert len(found) == 1, "what was seen to be ours can be called damaged"


def test_the_same_tokens_under_another_salt_are_not_served(guard, found):
    """SGLang issue 37160: storage keys hash tokens only."""
    pool = make_mha("layer_first")
    guarded = guard(pool=pool)
    fill(pool)
    op, tokens = operation("tenant-a")
    scope.note_operation(op, tokens)
    with scope.running(op):
        guarded.batch_set(KEYS[:1], flat(pool, 0))
        assert missing(guarded.batch_get(KEYS[:1], targets(pool, 1))) == [False]
    assert guarded.batch_get(KEYS[:1], targets(pool, 1)) == [None]
    assert [(event["check"], event["kind"]) for event in found] == [("identity", "scope")]


@pytest.mark.parametrize(
    "make", [lambda: make_mha(dtype=torch.float16), lambda: make_mha("page_first")], ids=["dtype", "layout"]
)
def test_pages_of_another_geometry_are_not_served(guard, make):
    """SGLang issue 33268: same tokens, same size, another dtype."""
    pool = make_mha("layer_first")
    fill(pool)
    guard(pool=pool).batch_set(KEYS[:1], flat(pool, 0))
    other = make()
    assert guard(pool=other).batch_get(KEYS[:1], targets(other, 1)) == [None]


def test_side_pools_by_v2(guard, found, tmp_path):
    pool, side = make_mha("layer_first"), make_paged("page_first")
    guarded = guard(pool=pool)
    guarded.register_mem_host_pool_v2(side, PoolName.SWA)
    fill(side)
    keys = KEYS[:3]
    assert guarded.batch_set_v2([transfer(PoolName.SWA, keys, indices(0, 1, 2))]) == {PoolName.SWA: [True] * 3}
    assert guarded.batch_get_v2([transfer(PoolName.SWA, keys, indices(4, 5, 6))]) == {PoolName.SWA: [True] * 3}
    assert torch.equal(page_bytes(side, 5), page_bytes(side, 1))
    path = next(path for path in (tmp_path / "files").glob("*.swa*") if KEYS[1] in path.name)
    path.write_bytes(path.read_bytes()[::-1])
    assert guarded.batch_get_v2([transfer(PoolName.SWA, keys, indices(4, 5, 6))]) == {
        PoolName.SWA: [True, False, False]
    }
    assert page_bytes(side, 5).count_nonzero() == 0
    assert [event["pool"] for event in found] == ["swa"]


def test_v1_in_place_and_the_prefix_rule(guard, found):
    pool = make_mha("page_first")
    memory = Memory()
    guarded = guard(memory, pool, extra={"kvcanary_digests": "digests.sqlite"}, name="memory")
    fill(pool)
    pages = [page_bytes(pool, n) for n in range(4)]
    assert guarded.batch_set_v1(KEYS[:4], indices(0, 1, 2, 3)) == [True] * 4
    wipe(pool)
    assert guarded.batch_get_v1(KEYS[:4], indices(4, 5, 6, 7)) == [True] * 4
    assert all(torch.equal(page_bytes(pool, 4 + n), pages[n]) for n in range(4))
    memory.spoil = lambda n, data: data.roll(1, 1) if n == 2 else data
    assert guarded.batch_get_v1(KEYS[:4], indices(4, 5, 6, 7)) == [True, True, False, False]
    assert page_bytes(pool, 6).count_nonzero() == page_bytes(pool, 7).count_nonzero() == 0
    assert [event["page_key"] for event in found] == [KEYS[2]]


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_without_shared_digests_a_strange_page_is_missing_but_not_reported(guard, found, caplog):
    """Another host may have stored its own version in a backend that both use."""
    pool = make_mha("page_first")
    memory = Memory()
    guarded = guard(memory, pool, name="mooncake")
    assert "kvcanary_digests" in caplog.text
    fill(pool)
    guarded.batch_set_v1(KEYS[:2], indices(0, 1))
    memory.spoil = lambda n, data: data.roll(1, 1) if n == 1 else data
    assert guarded.batch_get_v1(KEYS[:2], indices(4, 5)) == [True, False]
    assert found == []
    assert guarded.status()["kv"]["unverified"] == 1


def test_hosts_share_digests_through_redis(guard, found, tmp_path):
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis")
    try:
        pool, memory = make_mha("page_first"), Memory()
        memory.register_mem_pool_host(pool)
        extra = {"kvcanary_digests": server.url}
        one, other = (guard(memory, pool, name="mooncake", extra=extra) for _ in range(2))
        fill(pool)
        assert one.batch_set_v1(KEYS[:2], indices(0, 1)) == [True, True]
        assert other.batch_get_v1(KEYS[:2], indices(4, 5)) == [True, True]
        memory.spoil = lambda n, data: data.roll(1, 1) if n == 1 else data
        assert other.batch_get_v1(KEYS[:2], indices(4, 5)) == [True, False]
        assert len(found) == 1
        server.stop()
        assert other.batch_get_v1(KEYS[:1], indices(4)) == [False], "no digests, no page"
        assert other.batch_set_v1(KEYS[2:3], indices(2)) == [False]
        assert KEYS[2] not in memory.pages
        server.start()
        time.sleep(0.1)
        assert other.batch_set_v1(KEYS[2:3], indices(2)) == [True]
    finally:
        server.stop()


def test_b4_an_exception_of_the_backend_is_a_miss(guard, caplog):
    """HF3FS_BUGS B4: any exception ended SGLang's I/O thread without a word."""
    pool = make_mha("page_first")
    memory = Memory()
    guarded = guard(memory, pool)
    memory.fails = True
    assert guarded.batch_get_v1(KEYS[:2], indices(0, 1)) == [False, False]
    assert guarded.batch_set_v1(KEYS[:2], indices(0, 1)) == [False, False]
    assert guarded.batch_exists_v2(KEYS[:2], []).kv_hit_pages == 0, "not implemented there"
    assert guarded.batch_get_v2([transfer(PoolName.SWA, KEYS[:1], indices(0))]) == {PoolName.SWA: [False]}
    assert "404" in caplog.text
    memory.fails = False
    assert guarded.batch_set_v1(KEYS[:1], indices(0)) == [True]


@pytest.mark.parametrize(
    ("answer", "count", "expected"),
    [
        (True, 2, [True, True]),  # HF3FS_BUGS B10
        (None, 1, [False]),
        ([True, True, True, False], 2, [True, False]),  # B18: K and V apart
        ([True], 3, [True, False, False]),  # A4: a short list
        ([], 0, []),
    ],
)
def test_whatever_a_backend_answers_becomes_one_value_a_page(answer, count, expected):
    assert as_list(answer, count) == expected


def stock_hf3fs(folder, pool, pages=64, entries=8):
    """SGLang's own backend with its mock client and its in-process metadata."""
    bytes_per_page = pool.get_ksize_per_token() * PAGE_SIZE
    stock = HiCacheHF3FS(
        rank=0, file_path=str(folder / "stock.bin"), file_size=bytes_per_page * pages, numjobs=1,
        bytes_per_page=bytes_per_page, entries=entries, client_timeout=1, dtype=pool.dtype,
        metadata_client=Hf3fsLocalMetadataClient(), is_page_first_layout=True, use_mock_client=True,
    )  # fmt: skip
    atexit.unregister(stock.close)  # it would write to a log that is closed by then
    return stock


@pytest.fixture
def keep_signals():
    """The stock backend replaces handlers for the whole process (HF3FS_BUGS B8)."""
    import signal

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


def test_the_stock_hf3fs_backend_clean(guard, found, tmp_path, keep_signals):
    pool = make_mha("page_first")
    guarded = guard(stock_hf3fs(tmp_path, pool), pool, name="hf3fs", extra={"kvcanary_digests": "d.sqlite"})
    fill(pool)
    before = page_bytes(pool, 2)
    assert guarded.batch_set_v1(KEYS[:3], indices(0, 1, 2)) == [True] * 3
    assert guarded.batch_get_v1(KEYS[:3], indices(4, 5, 6)) == [True] * 3
    assert torch.equal(page_bytes(pool, 6), before)
    assert found == []


def test_b3_the_stock_backend_moves_pages_up_and_the_guard_sees_it(guard, found, tmp_path, keep_signals):
    """HF3FS_BUGS B3: with a missing key in between, page b gets the bytes of page c, flagged as success."""
    pool = make_mha("page_first")
    stock = stock_hf3fs(tmp_path, pool)
    guarded = guard(stock, pool, name="hf3fs", extra={"kvcanary_digests": "d.sqlite"})
    fill(pool)
    before = page_bytes(pool, 2)
    guarded.batch_set_v1([KEYS[1], KEYS[2]], indices(1, 2))
    bare = stock.batch_get_v1(KEYS[:3], indices(4, 5, 6))
    assert bare[1:] == [True, True]
    assert torch.equal(page_bytes(pool, 5), before), "b holds c, says the stock backend, and that it is fine"
    assert guarded.batch_get_v1(KEYS[:3], indices(4, 5, 6)) == [False, False, False]
    assert found[0]["page_key"] == KEYS[1]


def test_a1_a_stale_snapshot_of_the_stock_metadata_is_seen(guard, found, tmp_path, keep_signals):
    """HF3FS_BUGS A1: after a crash an old map names pages that hold other keys since."""
    pool = make_mha("page_first")
    stock = stock_hf3fs(tmp_path, pool, pages=2)  # K and V of one page
    guarded = guard(stock, pool, name="hf3fs", extra={"kvcanary_digests": "d.sqlite"})
    fill(pool)
    guarded.batch_set_v1(KEYS[:1], indices(0))
    [metadata] = stock.metadata_client._metadata.values()
    snapshot = dict(metadata.key_to_index)
    guarded.batch_set_v1(KEYS[1:2], indices(1))
    metadata.key_to_index.clear()
    metadata.key_to_index.update(snapshot)
    assert stock.batch_get_v1(KEYS[:1], indices(4)) == [True], "served as a hit"
    assert torch.equal(page_bytes(pool, 4), page_bytes(pool, 1)), "with the bytes of the other key"
    assert guarded.batch_get_v1(KEYS[:1], indices(4)) == [False]
    assert [event["kind"] for event in found] == ["digest"]


def test_a6_a_data_file_made_anew_is_seen(guard, found, tmp_path, keep_signals):
    """HF3FS_BUGS A6: the metadata outlives the file, and zeros of full length are a hit."""
    pool = make_mha("page_first")
    stock = stock_hf3fs(tmp_path, pool)
    guarded = guard(stock, pool, name="hf3fs", extra={"kvcanary_digests": "d.sqlite"})
    fill(pool)
    guarded.batch_set_v1(KEYS[:1], indices(0))
    with open(tmp_path / "stock.bin", "r+b") as file:
        size = file.seek(0, 2)
        file.truncate(0)
        file.truncate(size)
    assert stock.batch_get_v1(KEYS[:1], indices(4)) == [True]
    assert page_bytes(pool, 4).count_nonzero() == 0
    assert guarded.batch_get_v1(KEYS[:1], indices(4)) == [False]
    assert len(found) == 1


def test_mla_readers_verify_what_the_first_rank_stored(guard, found):
    pool = make_mla("layer_first")
    fill(pool)
    writer, reader = (guard(pool=pool, is_mla_model=True, tp_rank=rank, tp_size=2) for rank in (0, 1))
    writer.batch_set(KEYS[:1], flat(pool, 0))
    assert missing(reader.batch_get(KEYS[:1], targets(pool, 1))) == [False]


def test_it_passes_for_the_backend(guard):
    memory = Memory()
    guarded = guard(memory, make_mha("page_first"))
    assert isinstance(guarded, HiCacheStorage)
    assert guarded.only_here() == 42
    assert guarded.get_stats() is None
    assert guarded.mem_pool_host is memory.mem_pool_host
    with pytest.raises(AttributeError):
        guarded.nothing_like_it  # noqa: B018
    guarded.close()
    guarded.close()


def test_our_own_backend_is_not_guarded_twice(tmp_path):
    config = make_config({"path": str(tmp_path / "pages"), "capacity": "1MiB"})
    backend = guard_storage(lambda: VerifiedHF3FS(config), "dynamic", config)
    assert type(backend) is VerifiedHF3FS
    backend.close()
    scope.uninstall()


def test_the_setting_does_not_reach_the_backend(guard):
    seen = {}
    config = make_config({"kvcanary_digests": "d.sqlite", "other": 1})
    guard_storage(lambda: seen.update(config.extra_config) or Memory(), "memory", config).close()
    assert seen == {"other": 1}


def test_digests_that_cannot_be_kept_stop_the_start(guard, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot keep digests"):
        guard(Memory(), extra={"kvcanary_digests": str(tmp_path / "file" / "d.sqlite")})
    with pytest.raises(ConfigError, match=r"no Redis answers at 127\.0\.0\.1:1"):
        guard(Memory(), extra={"kvcanary_digests": "redis://u:geheim@127.0.0.1:1/0"})


def version(n, is_certain=True):
    return Version(n.to_bytes(16, "big"), bytes(16), n.to_bytes(16, "little"), is_certain)


def test_old_digests_go_first(tmp_path):
    digests = SqliteDigests(tmp_path / "d.sqlite", max_rows=160)
    for n in range(1000):
        digests.add([version(n)])
    found = digests.find([version(n).page for n in range(1000)])
    known = [n for n in range(1000) if found[version(n).page]]
    assert known == list(range(known[0], 1000))
    assert 160 <= len(known) <= 171
    digests.close()


def test_after_a_power_cut_nothing_is_certain(tmp_path, monkeypatch):
    digests = SqliteDigests(tmp_path / "d.sqlite")
    digests.add([version(1)])
    digests.close()
    monkeypatch.setattr(digest_store, "_boot_id", lambda: "another")
    again = SqliteDigests(tmp_path / "d.sqlite")
    assert again.find([version(1).page])[version(1).page] == [version(1, is_certain=False)]
    again.add([version(1)])
    assert again.find([version(1).page])[version(1).page] == [version(1)]
    again.close()


def test_a_page_with_too_many_versions_is_no_damage(guard, found):
    pool = make_mha("layer_first")
    guarded = guard(pool=pool)
    for n in range(MAX_VERSIONS + 3):
        fill(pool, seed=n)
        guarded.batch_set(KEYS[:1], flat(pool, 0))
    assert missing(guarded.batch_get(KEYS[:1], targets(pool, 1))) == [False], "the first, which the backend has kept"
    assert found == []
