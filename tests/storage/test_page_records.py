"""What the device made of a row when it stored it goes to storage with the page and is compared on the next device."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_pools import make_config, transfer
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvcanary_plugin.runtime import page_rows
from kvcanary_plugin.runtime.cause import BEFORE_STORAGE, TO_DEVICE
from kvcanary_plugin.runtime.page_rows import PageRows
from kvcanary_plugin.tiers import finding, page_records, scope
from kvcanary_plugin.tiers.guarded_storage import guard_storage
from kvcanary_plugin.tiers.hf3fs import pool_store
from kvcanary_plugin.tiers.hf3fs.backend import VerifiedHF3FS
from tests.hierarchy import Hierarchy

PAGE = 16
PROMPT = list(range(100, 148))
KEYS = ["first", "second", "third"]


class Server:
    """A guarded hierarchical cache with our storage behind it, in a folder that outlives it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.cache = Hierarchy(page_size=PAGE, size=192, **options)
        self.cache.controller.enable_storage = True
        extra = {"path": str(folder / "pages"), "capacity": "1MiB", "interface_v1": 1}
        self.backend = VerifiedHF3FS(make_config(extra))
        self.backend.register_mem_pool_host(self.cache.host)

    def store(self, tokens: list[int] = PROMPT) -> None:
        """Compute a prompt and store its pages, as the write-through policy does."""
        self.cache.serve(tokens)
        slots = torch.tensor(self.cache.host_slots_of(tokens))
        assert self.backend.batch_set_v1(KEYS, slots) == [True] * len(KEYS)
        self.cache.push_out()

    def fetch(self, tokens: list[int] = PROMPT, keys: list[str] = KEYS) -> torch.Tensor:
        """Take the pages back into host memory and the tree. Returns their host slots."""
        slots = self.cache.host.alloc(len(tokens))
        assert self.backend.batch_get_v1(keys, slots) == [True] * len(keys)
        tree = self.cache.tree
        assert tree._insert_helper_host(tree.root_node, RadixKey(array("q", tokens)), slots, list(keys)) == 0
        return slots

    def ask(self, tokens: list[int] = PROMPT) -> Any:
        """A request that continues the prompt."""
        request = self.cache.request(tokens=[*tokens, 7, 8])
        self.cache.process(self.cache.prefill(request))
        self.cache.process(self.cache.decode(request), finish=[request])
        return request

    def loads(self) -> list[tuple[bool, int]]:
        """Of each load: whether its records had to be made of the bytes as they came, and its rows."""
        return [(load.is_new, len(load.slots)) for _, load in self.cache.transfers.landed]

    def close(self) -> None:
        self.backend.close()
        self.cache.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(**options: Any) -> Server:
        if servers:
            servers[-1].close()
        servers.append(Server(tmp_path, **options))
        return servers[-1]

    finding._seen.clear()
    yield start
    servers[-1].close()
    scope.uninstall()


@pytest.mark.parametrize(
    ("kind", "io_backend", "layout"),
    [
        ("mha", "direct", "layer_first"),
        ("mha", "direct", "page_first_direct"),
        ("mha", "kernel", "page_first"),
        ("mla", "direct", "layer_first"),
        ("mla", "direct", "page_first_direct"),
    ],
)
def test_pages_come_back_with_their_records_and_are_silent(serve, kind, io_backend, layout):
    options = {"kind": kind, "io_backend": io_backend, "layout": layout}
    serve(**options).store()
    server = serve(**options)
    server.fetch()
    server.ask()
    assert server.loads() == [(False, 48)]
    server.cache.push_out()
    server.ask()  # and go on with them, from host memory
    assert server.cache.violations == []


def test_a_row_that_was_damaged_before_it_was_stored_is_found_by_the_next_server(serve):
    """The digest of the page is that of the damaged bytes: only the device's own can tell."""
    server = serve()
    server.cache.serve(PROMPT)
    slots = torch.tensor(server.cache.host_slots_of(PROMPT))
    server.cache.host.k_buffer[1].view(torch.int16)[slots[20], 0, 3] ^= 1 << 9
    assert all(server.backend.batch_set_v1(KEYS, slots))
    server = serve()
    slots = server.fetch()
    request = server.ask()
    (violation,) = server.cache.violations
    assert (violation.check, violation.phase, violation.layer, violation.half) == ("content", "load", 1, "K")
    assert (violation.tier, violation.hop, violation.host_slot) == ("host", BEFORE_STORAGE, int(slots[20]))
    assert violation.request == request.rid
    assert "before it went to storage" in violation.last_good


def test_a_row_that_was_damaged_in_host_memory_after_it_came_back_is_found(serve):
    serve().store()
    server = serve()
    slots = server.fetch()
    server.cache.host.v_buffer[2].view(torch.int16)[slots[30], 1, 3] ^= 1 << 9
    server.ask()
    (violation,) = server.cache.violations
    assert (violation.layer, violation.half, violation.hop) == (2, "V", BEFORE_STORAGE)


def test_a_row_that_was_damaged_on_its_way_to_the_device_is_found_with_its_host_copy_intact(serve):
    serve().store()
    server = serve()
    slots = server.fetch()
    cache = server.cache
    request = cache.request(tokens=[*PROMPT, 7, 8])

    def damage() -> None:
        cache.pool.k_buffer[1][int(cache.slots_of(request)[5]), 0, 0] += 1

    cache.between = damage
    cache.process(cache.prefill(request))
    (violation,) = cache.violations
    assert (violation.hop, violation.host_slot) == (TO_DEVICE, int(slots[5]))


def test_pages_that_the_engine_takes_for_others_are_found_by_their_tokens(serve):
    """The store returns exactly what it was asked for; whoever asked put the pages in the wrong order."""
    serve().store()
    server = serve()
    server.fetch(keys=["first", "third", "second"])
    server.ask()
    assert {violation.check for violation in server.cache.violations} == {"chain"}
    assert min(violation.position for violation in server.cache.violations) == PAGE


def test_pages_of_a_server_without_a_guard_load_as_before(serve, monkeypatch):
    server = serve()
    monkeypatch.setattr(page_records, "find", lambda pool: None)
    server.store()
    monkeypatch.undo()
    server = serve()
    server.fetch()
    server.ask()
    assert server.loads() == [(True, 48)]
    assert server.cache.violations == []


def test_records_of_another_arithmetic_are_left_alone(serve, monkeypatch):
    monkeypatch.setattr(page_rows, "mix", lambda words: words)
    serve().store()
    monkeypatch.undo()
    server = serve()
    server.fetch()
    server.ask()
    assert server.loads() == [(True, 48)]
    assert server.cache.violations == []


def test_what_is_read_of_a_row_is_part_of_the_fingerprint(serve):
    serve(content="partial").store()
    server = serve()
    server.fetch()
    server.ask()
    assert server.loads() == [(True, 48)]
    assert server.cache.violations == []


def test_a_guard_that_has_left_supplies_nothing(serve):
    """Nobody follows its slots any more, so what it knew of them may be of others by now."""
    server = serve()
    server.cache.serve(PROMPT)
    slots = torch.tensor(server.cache.host_slots_of(PROMPT))
    assert page_records.find(server.cache.host).collect(slots.numpy()).any()
    server.cache.session.guard = None
    assert not page_records.find(server.cache.host).collect(slots.numpy()).any()


def test_a_page_is_stored_without_records_if_they_do_not_come(serve, monkeypatch):
    monkeypatch.setattr(page_rows, "PATIENCE_S", 0.01)
    server = serve()
    request = server.cache.request(tokens=PROMPT)
    server.cache.process(server.cache.prefill(request))  # the records follow with the next forward
    slots = torch.tensor(server.cache.host_slots_of(PROMPT))
    assert all(server.backend.batch_set_v1(KEYS, slots))
    server = serve()
    server.fetch()
    server.ask()
    assert server.loads() == [(True, 48)]
    assert server.cache.violations == []


def test_a_side_pool_has_no_room_for_records(serve):
    assert str(PoolName.KV) == pool_store.KV
    server = serve()
    (store,) = server.backend._all()
    assert store._store.geometry.records_bytes == page_records.room_for(PAGE)


ROWS = np.arange(12, dtype=np.int64).reshape(4, 3) - 5


def test_encoding_is_undone():
    assert (page_records.decode(page_records.encode(ROWS, b"f" * 16), b"f" * 16, 4) == ROWS).all()


@pytest.mark.parametrize(
    ("data", "fingerprint", "tokens"),
    [
        (b"", b"f" * 16, 4),
        (page_records.encode(ROWS, b"f" * 16), b"g" * 16, 4),
        (page_records.encode(ROWS, b"f" * 16), b"f" * 16, 3),
        (page_records.encode(ROWS, b"f" * 16)[:-1], b"f" * 16, 4),
        (b"XXXX" + page_records.encode(ROWS, b"f" * 16)[4:], b"f" * 16, 4),
    ],
    ids=["none", "fingerprint", "tokens", "short", "magic"],
)
def test_records_that_are_not_understood_are_unknown(data, fingerprint, tokens):
    assert not page_records.decode(data, fingerprint, tokens).any()


def test_rows_nobody_knows_take_no_room():
    assert page_records.encode(np.zeros((4, 3), np.int64), b"f" * 16) == b""


def test_rows_of_an_earlier_filling_are_not_taken_for_those_of_a_later_one(monkeypatch):
    monkeypatch.setattr(page_rows, "PATIENCE_S", 0.01)
    rows, slots = PageRows(8), np.array([2, 3])
    records = torch.full((2, 4), -1, dtype=torch.int64)
    rows.expect(slots, 5)
    rows.bring(slots, 5, records)
    rows.expect(slots[1:], 9)
    assert rows.collect(slots)[0].all()
    assert not rows.collect(slots)[1].any()


def test_rows_that_arrive_late_do_not_replace_what_storage_has_brought():
    """The slot was given back and filled from storage before the records of its earlier rows had come."""
    rows, slots = PageRows(8), np.array([2, 3])
    rows.expect(slots, 5)
    rows.bring(slots, 5, torch.full((2, 4), -1, dtype=torch.int64))
    rows.forget(slots)
    rows.supply(slots, np.full((2, 3), 7))
    began = time.monotonic()
    assert (rows.collect(slots) == 7).all()
    assert time.monotonic() - began < page_rows.PATIENCE_S / 2, "nobody waits for what came from storage"


@pytest.fixture
def stored(serve) -> Server:
    server = serve()
    server.cache.serve(PROMPT)
    return server


def free_when(monkeypatch: pytest.MonkeyPatch, server: Server, call: str, when: str, slots: torch.Tensor) -> None:
    """The host pool takes ``slots`` back while the page store works on them, or when it has."""
    store, free = server.backend._all()[0]._store, server.cache.host.free
    wrapped = getattr(store, call)

    def freeing(*args: Any) -> Any:
        if when == "during":
            free(slots)
        return wrapped(*args)

    monkeypatch.setattr(store, call, freeing)


@pytest.mark.parametrize(("when", "count"), [("during", PAGE), ("after", 0)])
def test_a_host_slot_that_is_freed_while_it_is_stored_is_found(stored, monkeypatch, when, count):
    slots = torch.tensor(stored.cache.host_slots_of(PROMPT))
    free_when(monkeypatch, stored, "set", when, slots[PAGE : 2 * PAGE])
    stored.backend.batch_set_v1(KEYS, slots)
    if when == "after":
        stored.cache.host.free(slots[PAGE : 2 * PAGE])
    stored.cache.process(stored.cache.prefill(stored.cache.request(tokens=[1, 2, 3])))
    assert [each.kind for each in stored.cache.violations] == ["host_free_in_flight"] * count
    assert {each.slot for each in stored.cache.violations} <= set(slots[PAGE : 2 * PAGE].tolist())


@pytest.mark.parametrize(("when", "count"), [("during", 3 * PAGE), ("after", 0)])
def test_a_host_slot_that_is_freed_while_it_is_filled_from_storage_is_found(stored, monkeypatch, when, count):
    assert all(stored.backend.batch_set_v1(KEYS, torch.tensor(stored.cache.host_slots_of(PROMPT))))
    slots = stored.cache.host.alloc(3 * PAGE)
    free_when(monkeypatch, stored, "get", when, slots)
    assert all(stored.backend.batch_get_v1(KEYS, slots))
    if when == "after":
        stored.cache.host.free(slots)
    stored.cache.process(stored.cache.prefill(stored.cache.request(tokens=[1, 2, 3])))
    assert [each.kind for each in stored.cache.violations] == ["host_free_in_flight"] * count


def test_storage_that_fills_a_host_slot_nobody_was_given_is_found(stored):
    assert all(stored.backend.batch_set_v1(KEYS, torch.tensor(stored.cache.host_slots_of(PROMPT))))
    slots = stored.cache.host.alloc(3 * PAGE)
    stored.cache.host.free(slots)
    stored.backend.batch_get_v1(KEYS, slots)
    stored.cache.process(stored.cache.prefill(stored.cache.request(tokens=[1, 2, 3])))
    assert {each.kind for each in stored.cache.violations} == {"host_slot_free"}


def test_a_flush_under_a_storage_thread_is_no_finding(stored, monkeypatch):
    """SGLang does not wait for its prefetch thread when it flushes; the slots start another life."""
    slots = torch.tensor(stored.cache.host_slots_of(PROMPT))
    store = stored.backend._all()[0]._store
    wrapped = store.set
    monkeypatch.setattr(store, "set", lambda *args: (stored.cache.host.clear(), wrapped(*args))[1])
    stored.backend.batch_set_v1(KEYS, slots)
    assert not stored.cache.transfers.host._storage_uses.any()
    taken = stored.cache.host.alloc(3 * PAGE)
    stored.cache.host.free(taken)
    assert not stored.cache.transfers.found


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("when", "count"), [("during", PAGE), ("after", 0)])
def test_host_slots_that_another_backend_uses_are_followed_too(stored, monkeypatch, tmp_path, version, when, count):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    host, slots = stored.cache.host, torch.tensor(stored.cache.host_slots_of(PROMPT))

    class Backend(HiCacheStorage):
        """Stores nothing, while the host pool takes a page back."""

        def _store(self) -> list[bool]:
            if when == "during":
                host.free(slots[:PAGE])
            return [True] * len(KEYS)

        def batch_set_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> list[bool]:
            return self._store()

        def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
            return {PoolName.KV: self._store()}

        get = batch_get = set = batch_set = exists = lambda *_, **__: None

    guarded = guard_storage(Backend, "other", make_config({}))
    guarded.register_mem_pool_host(host)
    try:
        if version == 1:
            guarded.batch_set_v1(KEYS, slots)
        else:
            guarded.batch_set_v2([transfer(PoolName.KV, KEYS, slots)])
        if when == "after":
            host.free(slots[:PAGE])
    finally:
        guarded.close()
    stored.cache.process(stored.cache.prefill(stored.cache.request(tokens=[1, 2, 3])))
    assert [each.kind for each in stored.cache.violations] == ["host_free_in_flight"] * count
