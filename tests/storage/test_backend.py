"""The backend on real host pools of SGLang: every layout, rank, pool and interface, and what goes wrong."""

import inspect
import os
import signal
import threading

import pytest
import torch
from host_pools import (
    MHA_LAYOUTS,
    MLA_LAYOUTS,
    PAGE_SIZE,
    fill,
    indices,
    make_asymmetric,
    make_config,
    make_logical,
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
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvcanary_plugin.errors import ConfigError, UncoveredError
from kvcanary_plugin.tiers import finding, scope
from kvcanary_plugin.tiers.hf3fs.backend import VerifiedHF3FS
from kvcanary_plugin.tiers.hf3fs.layout import Layout

KEYS = [f"{n:064x}" for n in range(1, 9)]
POOLS = {
    **{f"mha-{layout}": (make_mha, layout) for layout in MHA_LAYOUTS},
    **{f"asymmetric-{layout}": (make_asymmetric, layout) for layout in ("page_first", "page_first_direct")},
    **{f"mla-{layout}": (make_mla, layout) for layout in MLA_LAYOUTS},
    **{f"paged-{layout}": (make_paged, layout) for layout in MLA_LAYOUTS},
}


class Backends:
    def __init__(self, folder):
        self.folder, self.opened = folder, []

    def __call__(self, pool=None, *, interface_v1=1, options=None, **config):
        extra = {"path": str(self.folder / "pages"), "capacity": "1MiB", "interface_v1": interface_v1}
        backend = VerifiedHF3FS(make_config({**extra, **(options or {})}, **config), {})
        self.opened.append(backend)
        if pool is not None:
            backend.register_mem_pool_host(pool)
        return backend


@pytest.fixture
def open_backend(tmp_path):
    backends = Backends(tmp_path)
    yield backends
    for backend in backends.opened:
        backend.close()
    scope.uninstall()


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
    yield listener.events
    finding.listen(None)


def damage_pages(backend):
    """Flip a bit in every slot of the KV pool's file."""
    file = backend._stores["kv"]._store._store.file
    layout = Layout(file.payload_bytes, 0, file.slot_count)
    with open(file.path, "r+b") as raw:
        for slot in range(file.slot_count):
            raw.seek(layout.slot_offset(slot) + 5)
            byte = raw.read(1)[0]
            raw.seek(-1, os.SEEK_CUR)
            raw.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("kind", POOLS)
def test_round_trip_of_every_pool_and_layout(open_backend, kind):
    make, layout = POOLS[kind]
    pool = make(layout)
    backend = open_backend(pool)
    fill(pool)
    pages = {n: page_bytes(pool, n) for n in range(8)}
    assert backend.batch_set_v1(KEYS[:3], indices(1, 5, 2)) == [True] * 3
    wipe(pool)
    blank = page_bytes(pool, 7)
    assert backend.batch_get_v1([KEYS[2], KEYS[7], KEYS[0]], indices(3, 7, 4)) == [True, False, True]
    assert torch.equal(page_bytes(pool, 3), pages[2])
    assert torch.equal(page_bytes(pool, 4), pages[1])
    assert torch.equal(page_bytes(pool, 7), blank), "a miss leaves the page alone"
    assert all(torch.equal(page_bytes(pool, n), blank) for n in (0, 1, 2, 5, 6))
    assert backend.batch_exists(KEYS[:4]) == 3
    assert backend.batch_exists([KEYS[7], KEYS[0]]) == 0
    assert backend.exists(KEYS[0])
    assert not backend.exists(KEYS[7])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_every_dtype(open_backend, dtype):
    pool = make_mha(dtype=dtype)
    backend = open_backend(pool)
    fill(pool)
    before = page_bytes(pool, 2)
    assert backend.batch_set_v1(KEYS[:1], indices(2)) == [True]
    wipe(pool)
    assert backend.batch_get_v1(KEYS[:1], indices(6)) == [True]
    assert torch.equal(page_bytes(pool, 6), before)


@pytest.mark.parametrize("kind", ["mha-layer_first", "mha-page_first", "mla-layer_first", "paged-page_first"])
def test_the_generic_interface(open_backend, kind):
    make, layout = POOLS[kind]
    pool = make(layout)
    backend = open_backend(pool, interface_v1=0)
    fill(pool)
    before = page_bytes(pool, 1)
    assert backend.batch_set(KEYS[:2], [pool.get_data_page(PAGE_SIZE), pool.get_data_page(2 * PAGE_SIZE)])
    assert backend.set(KEYS[2], pool.get_data_page(3 * PAGE_SIZE))
    assert backend.batch_exists(KEYS[:4]) == 3
    targets = [pool.get_dummy_flat_data_page() for _ in range(3)]
    got = backend.batch_get([KEYS[0], KEYS[5], KEYS[2]], targets)
    assert got[0] is targets[0]
    assert got[1] is None
    wipe(pool)
    pool.set_from_flat_data_page(4 * PAGE_SIZE, got[0])
    assert torch.equal(page_bytes(pool, 4), before)
    assert backend.get(KEYS[5], targets[1]) is None
    assert backend.get(KEYS[1], targets[1]) is targets[1]


def test_draft_pages_by_the_generic_interface_beside_v1(open_backend):
    """SGLang stores a draft model's pages through the generic calls, whatever the interface of the others."""
    pool, draft = make_mha(), make_mha(layers=1)
    backend = open_backend(pool)
    fill(pool)
    fill(draft, seed=1)
    keys = [f"{key}.draft" for key in KEYS[:2]]
    assert backend.batch_set_v1(KEYS[:2], indices(0, 1)) == [True, True]
    assert backend.batch_set(keys, [draft.get_data_page(0), draft.get_data_page(PAGE_SIZE)])
    got = backend.batch_get(keys, [draft.get_dummy_flat_data_page() for _ in keys])
    assert same_bytes(got[1], draft.get_data_page(PAGE_SIZE))
    assert backend.batch_exists(KEYS[:2]) == 2


def test_side_pools_by_v2(open_backend):
    pool, side = make_mha(), make_paged("page_first")
    backend = open_backend(pool)
    backend.register_mem_host_pool_v2(pool, PoolName.KV)
    backend.register_mem_host_pool_v2(side, PoolName.DEEPSEEK_V4_C4)
    fill(pool)
    fill(side, seed=1)
    before = page_bytes(side, 2)
    name = PoolName.DEEPSEEK_V4_C4
    assert backend.batch_set_v1(KEYS[:3], indices(0, 1, 2)) == [True] * 3
    assert backend.batch_set_v2([transfer(name, KEYS[:2], indices(1, 2))]) == {name: [True, True]}
    hits = backend.batch_exists_v2(KEYS[:3], [transfer(name, None, None)])
    assert (hits.kv_hit_pages, hits.extra_pool_hit_pages[name]) == (2, 2)
    wipe(side)
    assert backend.batch_get_v2([transfer(name, [KEYS[1], KEYS[2]], indices(5, 6))]) == {name: [True, False]}
    assert torch.equal(page_bytes(side, 5), before)
    assert {path.name.split(".")[1] for path in (open_backend.folder / "pages").glob("*.kvpages")} == {"kv", str(name)}


@pytest.mark.parametrize(
    ("side", "tail", "expected"),
    [([1, 1, 1, 0], 1, 3), ([0, 0, 1, 0], 1, 3), ([0, 1, 1, 0], 2, 3), ([1, 0, 0, 0], 2, 1), ([0, 0, 0, 1], 1, 4),
     ([0, 0, 0, 0], 1, 0)],
)  # fmt: skip
def test_trailing_pages_policy(open_backend, side, tail, expected):
    pool, states = make_mha(), make_paged("page_first")
    backend = open_backend(pool)
    backend.register_mem_host_pool_v2(states, PoolName.SWA)
    backend.batch_set_v1(KEYS[:4], indices(0, 1, 2, 3))
    for n, is_stored in enumerate(side):
        if is_stored:
            backend.batch_set_v2([transfer(PoolName.SWA, [KEYS[n]], indices(n))])
    asked = transfer(PoolName.SWA, KEYS[:tail], None, hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert backend.batch_exists_v2(KEYS[:4], [asked]).kv_hit_pages == expected


def test_two_side_pools_constrain_each_other(open_backend):
    """The tail of one pool has to be there for the length that the other leaves."""
    pool, one, two = make_mha(), make_paged("page_first"), make_paged("page_first")
    backend = open_backend(pool)
    backend.register_mem_host_pool_v2(one, PoolName.SWA)
    backend.register_mem_host_pool_v2(two, PoolName.INDEXER)
    backend.batch_set_v1(KEYS[:4], indices(0, 1, 2, 3))
    backend.batch_set_v2([transfer(PoolName.SWA, [KEYS[0], KEYS[3]], indices(0, 3))])
    backend.batch_set_v2([transfer(PoolName.INDEXER, KEYS[:3], indices(0, 1, 2))])
    tail = transfer(PoolName.SWA, KEYS[:1], None, hit_policy=PoolHitPolicy.TRAILING_PAGES)
    hits = backend.batch_exists_v2(KEYS[:4], [tail, transfer(PoolName.INDEXER, None, None)])
    assert hits.kv_hit_pages == 1


def test_a_logical_pool_remembers_which_pages_there_are(open_backend):
    pool = make_logical()
    backend = open_backend(pool)
    assert backend.batch_set_v1(KEYS[:2], indices(0, 1)) == [True, True]
    assert backend.batch_get_v1(KEYS[:3], indices(4, 5, 6)) == [True, True, False]
    assert backend.batch_exists(KEYS[:3]) == 2


def test_mla_ranks_share_the_pages_of_the_first(open_backend):
    pool, other = make_mla(), make_mla()
    first, second = ({"is_mla_model": True, "tp_rank": rank, "tp_size": 2} for rank in (0, 1))
    reader = open_backend(other, **second)
    assert reader.batch_get_v1(KEYS[:1], indices(0)) == [False], "nobody has written yet"
    writer = open_backend(pool, **first)
    fill(pool)
    assert writer.batch_set_v1(KEYS[:1], indices(3)) == [True]
    assert reader.batch_set_v1(KEYS[1:2], indices(0)) == [True], "b10: a list, though nothing is written"
    assert writer.batch_exists(KEYS[1:2]) == 0
    reader._stores["kv"]._store._retry_at = 0.0
    assert reader.batch_exists(KEYS[:2]) == 1
    assert reader.batch_get_v1(KEYS[:1], indices(5)) == [True]
    assert torch.equal(page_bytes(other, 5), page_bytes(pool, 3))
    assert len(list((open_backend.folder / "pages").glob("*.kvpages"))) == 1


DIFFERENT = {
    "model": {"model_name": "org/other"},
    "tp rank": {"tp_rank": 1, "tp_size": 2},
    "tp size": {"tp_size": 2},
    "pp rank": {"pp_rank": 1, "pp_size": 2},
    "cp rank": {"attn_cp_rank": 1, "attn_cp_size": 2},
    "weights": {"options": {"identity": {"weights": "b"}}},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a8_pages_of_another_identity_are_never_found(open_backend, name):
    """HF3FS_BUGS A8: keys hash tokens only; model, stages and ranks shared pages and files."""
    pool = make_mha()
    one, other = open_backend(pool), open_backend(pool, **DIFFERENT[name])
    fill(pool)
    assert one.batch_set_v1(KEYS[:1], indices(0)) == [True]
    assert other.batch_exists(KEYS[:1]) == 0
    assert other.batch_get_v1(KEYS[:1], indices(1)) == [False]


@pytest.mark.parametrize(
    "make",
    [lambda: make_mha(dtype=torch.float16), lambda: make_mha("layer_first"), lambda: make_mha(layers=6)],
    ids=["dtype", "layout", "layers"],
)
def test_a7_pages_of_another_geometry_are_never_found(open_backend, make):
    """HF3FS_BUGS A7: restarted with another KV dtype, old page numbers pointed at other bytes."""
    open_backend(make_mha()).batch_set_v1(KEYS[:1], indices(0))
    other = open_backend(make())
    assert other.batch_exists(KEYS[:1]) == 0
    assert other.batch_get_v1(KEYS[:1], indices(1)) == [False]


def test_a8_two_processes_of_one_identity_have_a_file_each(open_backend):
    """Data-parallel replicas: the same rank twice on one host."""
    pool = make_mha()
    one, other = open_backend(pool), open_backend(pool)
    fill(pool)
    assert one.batch_set_v1(KEYS[:1], indices(0)) == [True]
    assert other.batch_exists(KEYS[:1]) == 0
    assert other.batch_set_v1(KEYS[:1], indices(1)) == [True]
    before = page_bytes(pool, 0)
    assert one.batch_get_v1(KEYS[:1], indices(2)) == [True]
    assert torch.equal(page_bytes(pool, 2), before)


def test_warm_restart(open_backend):
    pool = make_mha()
    fill(pool)
    before = page_bytes(pool, 1)
    first = open_backend(pool)
    first.batch_set_v1(KEYS[:2], indices(0, 1))
    first.close()
    again = open_backend(pool)
    assert again.batch_exists(KEYS[:3]) == 2
    assert again.batch_get_v1(KEYS[1:2], indices(6)) == [True]
    assert torch.equal(page_bytes(pool, 6), before)


def test_a_salted_request_never_meets_pages_of_another(open_backend):
    pool = make_mha()
    backend = open_backend(pool)
    fill(pool)
    for n, salt in enumerate((None, "tenant-a")):
        op, tokens = operation(salt)
        scope.note_operation(op, tokens)
        with scope.running(op):
            assert backend.batch_exists(KEYS[:1]) == 0
            assert backend.batch_set_v1(KEYS[:1], indices(n)) == [True]
    for n, salt in enumerate((None, "tenant-a", "tenant-b")):
        op, tokens = operation(salt)
        scope.note_operation(op, tokens)
        with scope.running(op):
            assert backend.batch_get_v1(KEYS[:1], indices(5)) == [n < 2]
            if n < 2:
                assert torch.equal(page_bytes(pool, 5), page_bytes(pool, n))
    assert scope.current() == ""


def test_sglang_s_operations_carry_their_scope(open_backend, monkeypatch):
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller
    from sglang.srt.mem_cache.radix_cache import RadixKey

    open_backend()
    key = RadixKey([1, 2, 3], extra_key="salt")
    made = inspect.signature(cache_controller.PrefetchOperation).parameters
    host = {"host_indices": indices(0)} if "host_indices" in made else {}
    operations = [
        cache_controller.StorageOperation(indices(0), key),
        cache_controller.PrefetchOperation("r", token_ids=key, **host),
    ]
    for op in operations:
        with scope.running(op):
            assert "salt" in scope.current()
    seen = []

    class Store:
        def batch_exists(self, keys, extra_info=None):
            seen.append(scope.current())
            return 0

    for module, owner in (
        (cache_controller, cache_controller.HiCacheController),
        (hybrid_cache_controller, hybrid_cache_controller.HybridCacheController),
    ):
        monkeypatch.setattr(module, "get_storage_hash_str", lambda *_, **__: KEYS[:1], raising=False)
        controller = owner.__new__(owner)
        vars(controller).update(page_size=PAGE_SIZE, storage_backend=Store(), get_hash_str=lambda *_, **__: KEYS[:1])
        vars(operations[1]).update(pool_transfers=None, pool_storage_result=PoolTransferResult.empty())
        vars(operations[1]).update(assume_stored=False)
        controller._storage_hit_query(operations[1])
    assert len(seen) == 2
    assert all("salt" in text for text in seen)


def test_after_a_weight_update_old_pages_are_not_found(open_backend, monkeypatch):
    pool = make_mha()
    backend = open_backend(pool)
    monkeypatch.setattr(scope, "_weights", "")

    def exists():
        op, tokens = operation()
        scope.note_operation(op, tokens)
        with scope.running(op):
            return backend.batch_exists(KEYS[:1])

    assert backend.batch_set_v1(KEYS[:1], indices(0)) == [True]
    assert exists() == 1
    scope.note_weights_changed("v2")
    assert exists() == 0
    scope.note_weights_changed(None)
    assert exists() == 0


def test_a_damaged_page_is_a_miss_a_report_and_wiped(open_backend, found):
    pool = make_mha()
    backend = open_backend(pool)
    fill(pool)
    backend.batch_set_v1(KEYS[:2], indices(0, 1))
    damage_pages(backend)
    assert backend.batch_get_v1(KEYS[:2], indices(4, 5)) == [False, False]
    assert page_bytes(pool, 4).count_nonzero() == 0
    assert [(event["check"], event["kind"], event["tier"]) for event in found] == [("content", "digest", "storage")] * 2
    assert found[0]["page_key"] == KEYS[0]
    assert found[0]["hop"] == "storage -> host"
    assert backend.batch_exists(KEYS[:2]) == 0
    assert backend.batch_set_v1(KEYS[:2], indices(0, 1)) == [True, True]
    assert backend.batch_get_v1(KEYS[:2], indices(4, 5)) == [True, True]
    assert len(found) == 2


def test_b11_one_bad_page_of_ten_is_one_miss(open_backend, found):
    pool = make_mha()
    backend = open_backend(pool)
    fill(pool)
    backend.batch_set_v1(KEYS, indices(*range(8)))
    store = backend._stores["kv"]._store._store
    place = store.index.lookup(backend._stores["kv"]._store.name_pages([KEYS[3]]))[0]
    store.file.discard([place.slot])
    store.index.release([place])
    assert backend.batch_get_v1(KEYS, indices(*range(8))) == [n != 3 for n in range(8)]
    assert [event["kind"] for event in found] == ["free"]


def test_no_exception_leaves_while_serving(open_backend, caplog):
    pool = make_mha()
    backend = open_backend(pool)
    wrong = indices(0)[:-1]
    assert backend.batch_get_v1(KEYS[:2], wrong) == [False, False]
    assert backend.batch_set_v1(KEYS[:2], wrong) == [False, False]
    assert backend.batch_get_v1(KEYS[:1], None) == [False]
    assert backend.batch_get_v2([transfer(PoolName.MAMBA, KEYS[:1], indices(0))]) == {PoolName.MAMBA: [False]}
    assert backend.batch_set_v2([transfer(PoolName.MAMBA, None, None)]) == {PoolName.MAMBA: []}
    assert backend.batch_get(KEYS[:1], None) == [None]
    assert backend.get(KEYS[0], None) is None
    assert backend.set(KEYS[0], None) is False
    assert backend.batch_set(KEYS[:1], ["no tensor"]) is False
    assert backend.errors >= 8
    unregistered = open_backend()
    assert unregistered.batch_exists(KEYS) == 0
    assert unregistered.batch_get_v1(KEYS[:1], indices(0)) == [False]
    assert unregistered.batch_exists_v2(KEYS, []).kv_hit_pages == 0
    assert "counted as a miss" in caplog.text


def test_b1_b2_an_empty_batch_is_fine_and_a_bad_one_does_not_close_anything(open_backend):
    """HF3FS_BUGS B1, B2."""
    pool = make_mha()
    backend = open_backend(pool)
    assert backend.batch_get_v1([], indices(0)[:0]) == []
    assert backend.batch_set_v1([], indices(0)[:0]) == []
    assert backend.batch_exists([]) == 0
    backend.batch_get_v1(KEYS[:2], indices(0))
    assert backend.batch_set_v1(KEYS[:1], indices(0)) == [True]
    assert backend.batch_get_v1(KEYS[:1], indices(1)) == [True]


def test_b8_signal_handlers_are_left_alone(open_backend):
    """HF3FS_BUGS B8: SIGTERM and others were replaced for the whole process."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)]
    results = []
    thread = threading.Thread(target=lambda: results.append(open_backend(make_mha())))
    thread.start()
    thread.join(60)
    assert results, "can be made off the main thread"
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)]


def test_b9_close_is_idempotent_and_leaves_no_descriptor(open_backend):
    """HF3FS_BUGS B9: a second close raised and skipped the rest."""
    before = len(os.listdir("/proc/self/fd"))
    pool = make_mha()
    backend = open_backend(pool)
    backend.register_mem_host_pool_v2(make_paged("page_first"), PoolName.SWA)
    backend.batch_set_v1(KEYS[:1], indices(0))
    backend.close()
    backend.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert backend.batch_set_v1(KEYS[:1], indices(0)) == [False]
    assert backend.batch_get_v1(KEYS[:1], indices(0)) == [False]
    assert backend.batch_exists(KEYS[:1]) == 0
    assert backend.get_stats() is None


def test_b12_every_layout_that_cannot_be_stored_is_an_error_at_the_start(open_backend):
    """HF3FS_BUGS B12: an unbound variable. Here the message names pool and layout."""
    pool = make_mla()
    pool.layout = "page_first_kv_split"
    with pytest.raises(UncoveredError, match="MLATokenToKVPoolHost with layout 'page_first_kv_split'"):
        open_backend(pool)


def test_b14_asymmetric_pools_need_the_v1_interface(open_backend):
    with pytest.raises(ConfigError, match="interface_v1"):
        open_backend(make_asymmetric(), interface_v1=0)


def test_b18_one_result_a_key(open_backend):
    pool = make_mha("page_first")
    assert open_backend(pool).batch_set_v1(KEYS[:1], indices(0)) == [True]


def test_metrics_are_those_of_sglang_s_backends(open_backend):
    pool = make_mha()
    backend = open_backend(pool, enable_storage_metrics=True)
    backend.batch_set_v1(KEYS[:3], indices(0, 1, 2))
    backend.batch_get_v1([*KEYS[:2], KEYS[7]], indices(3, 4, 5))
    stats = backend.get_stats()
    assert isinstance(stats, StorageMetrics)
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [2])
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
    assert backend.get_stats() == StorageMetrics()
    assert open_backend(make_mha("layer_first")).get_stats() is None


def test_clear(open_backend):
    pool = make_mha()
    backend = open_backend(pool)
    backend.batch_set_v1(KEYS[:2], indices(0, 1))
    backend.clear()
    assert backend.batch_exists(KEYS[:2]) == 0
    assert backend.batch_set_v1(KEYS[:2], indices(0, 1)) == [True, True]


def test_sglang_s_factory_makes_it(open_backend):
    pool = make_mha()
    extra = {
        "backend_name": "kvcanary_hf3fs", "module_path": "kvcanary_plugin.tiers.hf3fs.backend",
        "class_name": "VerifiedHF3FS", "interface_v1": 1, "path": str(open_backend.folder / "pages"),
        "capacity": "1MiB",
    }  # fmt: skip
    backend = StorageBackendFactory.create_backend("dynamic", make_config(extra), pool)
    open_backend.opened.append(backend)
    backend.register_mem_pool_host(pool)
    assert isinstance(backend, HiCacheStorage)
    assert backend.batch_set_v1(KEYS[:1], indices(0)) == [True]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": ""}, '"path"'),
        ({"capacity": "much"}, "capacity='much' is no size"),
        ({"capacity": "4KiB"}, "holds no page"),
        ({"client": "nfs"}, "'nfs' is not one of local, usrbio"),
        ({"threads": 0}, "threads=0 must be a whole number"),
        ({"indx": "x"}, "no setting indx; it has .*capacity.*index"),
        ({"index": "redis://127.0.0.1:1/0"}, "no Redis answers at redis://127.0.0.1:1/0"),
        ({"path": "/proc/nowhere"}, "cannot use '/proc/nowhere'"),
        ({"client": "usrbio"}, "hf3fs|3FS"),
    ],
)
def test_bad_settings_stop_the_start_with_a_message(open_backend, options, words):
    with pytest.raises(ConfigError, match=words):
        open_backend(make_mha(), options=options)
    before = os.listdir(open_backend.folder)
    assert before in ([], ["pages"])


@pytest.fixture
def redis_url(tmp_path):
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis")
    yield server.url
    server.stop()


def test_hosts_on_one_namespace_share_pages(open_backend, redis_url):
    """Two servers, a folder they both see, one Redis: each writes its own file and reads both."""
    pool = make_mha()
    one, other = (open_backend(pool, options={"index": redis_url, "host": host}) for host in ("host-a", "host-b"))
    fill(pool)
    before = [page_bytes(pool, n) for n in range(3)]
    assert one.batch_set_v1(KEYS[:2], indices(0, 1)) == [True, True]
    assert other.batch_exists(KEYS[:3]) == 2
    assert other.batch_set_v1(KEYS[1:3], indices(1, 2)) == [True, True], "one of them is there already"
    assert other.status()["kv"]["duplicate"] == 1
    wipe(pool)
    for backend in (one, other):
        assert backend.batch_get_v1(KEYS[:3], indices(4, 5, 6)) == [True] * 3
        assert all(torch.equal(page_bytes(pool, 4 + n), before[n]) for n in range(3))
    assert sorted(path.name.split(".")[-3] for path in (open_backend.folder / "pages").glob("*.kvpages")) == [
        "host-a",
        "host-b",
    ]


def test_mla_readers_on_another_host_find_pages_through_redis(open_backend, redis_url):
    pool = make_mla()
    fill(pool)
    writer = open_backend(pool, is_mla_model=True, tp_size=2, options={"index": redis_url, "host": "host-a"})
    assert writer.batch_set_v1(KEYS[:1], indices(0)) == [True]
    reader = open_backend(pool, is_mla_model=True, tp_rank=1, tp_size=2, options={"index": redis_url, "host": "host-b"})
    assert reader.batch_get_v1(KEYS[:1], indices(5)) == [True]
    assert torch.equal(page_bytes(pool, 5), page_bytes(pool, 0))


def test_b13_an_mha_side_pool_stores_k_and_v(open_backend):
    """HF3FS_BUGS B13: pages of a draft model's pool were twice as long as the slots made for them."""
    pool, draft = make_mha(), make_mha(layers=1)
    backend = open_backend(pool)
    backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)
    fill(draft)
    before = [page_bytes(draft, n) for n in range(3)]
    name = PoolName.DRAFT
    assert backend.batch_set_v2([transfer(name, KEYS[:3], indices(0, 1, 2))]) == {name: [True] * 3}
    wipe(draft)
    assert backend.batch_get_v2([transfer(name, KEYS[:3], indices(5, 6, 7))]) == {name: [True] * 3}
    assert all(torch.equal(page_bytes(draft, 5 + n), before[n]) for n in range(3))


def test_b17_without_a_config_for_metrics_there_are_none(open_backend):
    assert open_backend(make_mha(), enable_storage_metrics=False).get_stats() is None
