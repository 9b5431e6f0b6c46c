"""The storage backend that SGLang loads: every page verified, the worst outcome a miss.

Chosen with ``--kvcanary-hf3fs PATH``, or by hand::

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "kvcanary_hf3fs", "module_path": "kvcanary_plugin.tiers.hf3fs.backend",
        "class_name": "VerifiedHF3FS", "interface_v1": 1, "path": "/mnt/3fs/kv", "capacity": "200GiB"}'

SGLang calls it from its scheduler and I/O threads, where an exception would end a thread without a word. So none leaves
the methods that SGLang calls while it serves. Opening is different: a store that cannot be used stops the start.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from ...errors import UncoveredError
from .. import scope
from ..hits import count_prefix, match_pools
from .flat_stores import KV, FlatStores
from .metrics import IoMetrics
from .options import parse_options
from .pool_store import PoolStore

logger = logging.getLogger("kvcanary")

Result = TypeVar("Result")


def _contained(miss: Callable[..., Any]) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """An exception is logged and answered with what ``miss`` gives for the same arguments."""

    def decorate(method: Callable[..., Result]) -> Callable[..., Result]:
        @wraps(method)
        def contained(self: Any, *args: Any, **kwargs: Any) -> Result:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                self.note_error(method.__name__)
                answer: Result = miss(*args, **kwargs)
                return answer

        return contained

    return decorate


def _no_pages(keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


def _no_transfers(transfers: Sequence[Any], *_: Any, **__: Any) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}


class VerifiedHF3FS(HiCacheStorage):  # type: ignore[misc]
    """One for each rank.

    Args:
        storage_config: SGLang's ``HiCacheStorageConfig``; its ``extra_config`` holds the settings, see
            :class:`~kvcanary_plugin.tiers.hf3fs.options.StorageOptions`.
        kwargs: what SGLang's factory passes on; not used.

    Raises:
        ConfigError: a setting is wrong.
    """

    verifies_pages = True  # no guard needs to be put around it

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        scope.install()
        self.storage_config = storage_config
        self.options = parse_options(storage_config.extra_config)
        self.metrics = IoMetrics(storage_config.enable_storage_metrics)
        self.errors = 0
        # Ranks of an MLA model hold the same KV: the first one writes, the others read.
        self.is_reader = bool(storage_config.is_mla_model and storage_config.tp_rank != 0)
        if getattr(storage_config, "dcp_size", 1) > 1:
            raise UncoveredError(
                "kvcanary: the storage tier does not cover --dcp-size above 1: pages are spread over ranks"
            )
        self._stores: dict[str, PoolStore] = {}
        self._flat = FlatStores(self.options, storage_config, self.metrics, is_reader=self.is_reader)
        self._lock = threading.Lock()
        self._is_closed = False
        atexit.register(self.close)

    # Opening: errors stop the start of the server.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang's host pool of the model's KV is ready.

        Raises:
            ConfigError, UncoveredError: its pages cannot be stored; says why.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._flat.register(mem_pool_host)
        self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A side pool, such as the states of a hybrid model, is ready. Raises like :meth:`register_mem_pool_host`."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, pool: Any) -> None:
        if name == KV and self._flat.is_used:
            return
        with self._lock:
            if name not in self._stores:
                main = self._stores.get(KV)
                self._stores[name] = PoolStore.open(
                    self.options,
                    self.storage_config,
                    pool,
                    name,
                    self.metrics,
                    is_reader=self.is_reader,
                    slots=None if main is None else main.slot_count,
                )

    # Serving: nothing is raised.

    @_contained(_no_pages)
    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Fill the pages of the KV pool; one truth value a key."""
        return self._stores[KV].get(keys, host_indices)

    @_contained(_no_pages)
    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store pages of the KV pool; one truth value a key."""
        return [True] * len(keys) if self.is_reader else self._stores[KV].set(keys, host_indices)

    @_contained(_no_transfers)
    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Fill pages of several pools, each with its own keys and indices."""
        return {t.name: self._move(t, PoolStore.get) for t in transfers}

    @_contained(_no_transfers)
    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of several pools."""
        if self.is_reader:
            return {t.name: [True] * len(t.keys or []) for t in transfers}
        return {t.name: self._move(t, PoolStore.set) for t in transfers}

    def _move(self, transfer: Any, action: Callable[[PoolStore, list[str], torch.Tensor], list[bool]]) -> list[bool]:
        keys = transfer.keys or []
        store = self._stores.get(str(transfer.name))
        try:
            if store is None:
                raise KeyError(f"the pool {transfer.name} was not registered")
            return action(store, keys, transfer.host_indices)
        except Exception:  # the other pools go on
            self.note_error(f"transfer of pool {transfer.name}")
            return [False] * len(keys)

    @_contained(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of the first keys are all stored."""
        return count_prefix(self._exists(keys))

    @_contained(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """The longest prefix of ``keys`` that all pools have, each by its own policy."""

        def exists(name: str, some: list[str]) -> list[bool]:
            store = self._stores.get(name)
            return [False] * len(some) if store is None else store.exists(some)

        return match_pools(keys, self._exists(keys), pool_transfers or [], exists)

    @_contained(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        """Whether a page is stored."""
        return self._exists([key])[0]

    def _exists(self, keys: list[str]) -> list[bool]:
        if self._flat.is_used:
            return self._flat.exists(keys)
        return self._stores[KV].exists(keys)

    # The interface without host pools: each page is a tensor of its own.

    @_contained(lambda *_, **__: None)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Fill a contiguous tensor and return it; None for a miss."""
        return self._flat.get([key], [target_location])[0]

    @_contained(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Like :meth:`get` for several."""
        return self._flat.get(keys, target_locations)

    @_contained(lambda *_, **__: False)
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a contiguous tensor."""
        return self.is_reader or self._flat.set([key], [value])[0]

    @_contained(lambda *_, **__: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Like :meth:`set` for several; True if all are stored."""
        return self.is_reader or all(self._flat.set(keys, values))

    @_contained(lambda *_, **__: None)
    def clear(self) -> None:
        """Forget everything that this process has stored."""
        for store in self._all():
            store.clear()

    @_contained(lambda *_, **__: None)
    def get_stats(self) -> Any:
        """SGLang's ``StorageMetrics`` since the last call; None if metrics are off."""
        return self.metrics.collect()

    def status(self) -> dict[str, dict[str, int]]:
        """Pages by outcome for each pool, for people and tests."""
        pages: dict[str, Counter[str]] = {}
        for store in self._all():  # there may be several of one name, for tensors of several kinds
            pages.setdefault(store.name, Counter()).update(store.counts.copy())
        return {name: dict(counts) for name, counts in pages.items()}

    def close(self) -> None:
        """Wait for calls under way, then close files and indices. Idempotent; later calls are misses."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        atexit.unregister(self.close)
        for store in self._all():
            store.close()
            logger.info("kvcanary: closed the storage of pool %s: %s", store.name, dict(store.counts))

    def note_error(self, where: str) -> None:
        """An exception of ours or of SGLang's was answered with a miss."""
        self.errors += 1
        if self.errors <= 3 or self.errors % 1000 == 0:
            logger.exception("kvcanary: %s failed (error %d); counted as a miss", where, self.errors)

    def _all(self) -> list[Any]:
        return [*self._stores.values(), *self._flat.all()]
