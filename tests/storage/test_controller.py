"""SGLang's own controller above the backend: what its storage threads do, from host pool to host pool."""

import hashlib
import threading
from types import SimpleNamespace

import pytest
from host_pools import PAGE_SIZE, fill, indices, make_config, make_mha, make_mla, page_bytes, wipe
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation, StorageOperation
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvcanary_plugin.tiers import finding, scope
from kvcanary_plugin.tiers.hf3fs.backend import VerifiedHF3FS
from kvcanary_plugin.tiers.hf3fs.pool_store import PoolStore


def hash_tokens(key, last_hash=None, page_size=PAGE_SIZE):
    """A chain of hashes over pages of tokens, as SGLang's native extension makes them."""
    tokens = list(getattr(key, "token_ids", key))
    hashes = []
    for start in range(0, len(tokens), page_size):
        last_hash = hashlib.sha256(f"{last_hash}{tokens[start : start + page_size]}".encode()).hexdigest()
        hashes.append(last_hash)
    return hashes


def make_controller(pool, backend, *, v1):
    controller = HiCacheController.__new__(HiCacheController)
    vars(controller).update(
        mem_pool_host=pool, page_size=PAGE_SIZE, storage_backend=backend, has_draft=False, get_hash_str=hash_tokens,
        storage_config=SimpleNamespace(), storage_stop_event=threading.Event(),
    )  # fmt: skip
    controller.page_get_func = controller._page_get_zero_copy if v1 else controller._generic_page_get
    controller.page_set_func = controller._page_set_zero_copy if v1 else controller._generic_page_set
    return controller


@pytest.fixture(params=[True, False], ids=["v1", "generic"])
def make(request, tmp_path):
    backends = []

    def make_one(pool):
        extra = {"path": str(tmp_path / "pages"), "capacity": "1MiB", "interface_v1": int(request.param)}
        backend = VerifiedHF3FS(make_config(extra))
        backend.register_mem_pool_host(pool)
        backends.append(backend)
        return make_controller(pool, backend, v1=request.param), backend

    finding._seen.clear()
    yield make_one
    for backend in backends:
        backend.close()
    scope.uninstall()


def back_up(controller, key, *pages):
    hashes = hash_tokens(key)
    operation = StorageOperation(indices(*pages), key, hash_value=hashes)
    controller._page_backup(operation)
    return operation.completed_tokens


def prefetch(controller, key, *pages):
    """Pages that were loaded."""
    operation = PrefetchOperation("r", indices(*pages), key)
    operation.hash_value, hits = controller._storage_hit_query(operation)
    operation.host_indices = operation.host_indices[:hits]
    controller._page_transfer(operation)
    return hits // PAGE_SIZE, operation.completed_tokens // PAGE_SIZE


@pytest.mark.parametrize("pool", [make_mha, make_mla], ids=["mha", "mla"])
def test_pages_go_out_and_come_back(make, pool):
    pool = pool("page_first")
    controller, _ = make(pool)
    fill(pool)
    before = [page_bytes(pool, n) for n in range(8)]
    key = RadixKey(list(range(4 * PAGE_SIZE)))
    assert back_up(controller, key, 3, 1, 0, 2) == 4 * PAGE_SIZE
    wipe(pool)
    longer = RadixKey(list(range(6 * PAGE_SIZE)))
    assert prefetch(controller, longer, 7, 6, 5, 4, 3, 2) == (4, 4)
    assert all((page_bytes(pool, 7 - n) == before[source]).all() for n, source in enumerate((3, 1, 0, 2)))


def test_a_damaged_page_ends_the_prefix(make):
    pool = make_mha("page_first")
    controller, backend = make(pool)
    fill(pool)
    key = RadixKey(list(range(4 * PAGE_SIZE)))
    back_up(controller, key, 0, 1, 2, 3)
    [opened] = backend._all()
    named = opened._store if isinstance(opened, PoolStore) else opened
    store = named._store
    [place] = store.index.lookup(named.name_pages([hash_tokens(key)[2]]))
    store.index.release([place])
    store.file.quarantine([place.slot])
    assert prefetch(controller, key, 4, 5, 6, 7) == (4, 2)
    assert prefetch(controller, key, 4, 5, 6, 7) == (2, 2), "and is known to be missing from then on"
    assert back_up(controller, key, 0, 1, 2, 3) == 4 * PAGE_SIZE
    assert prefetch(controller, key, 4, 5, 6, 7) == (4, 4)


def test_the_extra_key_is_part_of_the_page_s_name(make):
    pool = make_mha("page_first")
    controller, _ = make(pool)
    fill(pool)
    tokens = list(range(2 * PAGE_SIZE))
    back_up(controller, RadixKey(tokens, extra_key="tenant-a"), 0, 1)
    assert prefetch(controller, RadixKey(tokens), 4, 5) == (0, 0)
    assert prefetch(controller, RadixKey(tokens, extra_key="tenant-b"), 4, 5) == (0, 0)
    assert prefetch(controller, RadixKey(tokens, extra_key="tenant-a"), 4, 5) == (2, 2)


def test_a_closed_backend_is_a_miss_and_the_thread_lives(make):
    pool = make_mha("page_first")
    controller, backend = make(pool)
    key = RadixKey(list(range(2 * PAGE_SIZE)))
    for store in backend._all():
        store.close()
    assert back_up(controller, key, 0, 1) == 0
    assert prefetch(controller, key, 4, 5) == (0, 0)
