"""The stores behind SGLang's interface without host pools, where each page comes as a tensor."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from ...errors import ConfigError
from .identity import describe_identity, make_geometry
from .layout import Layout
from .metrics import IoMetrics
from .named_store import NamedStore
from .options import StorageOptions
from .pool_store import MARKER_BYTES, make_marker

KV = str(PoolName.KV)
_SIDE_POOLS = frozenset(str(name) for name in PoolName) - {KV}


class FlatStores:
    """One store for each pool and kind of tensor, opened when first needed. The keys of a side pool end in its name.

    Attributes:
        is_used: whether SGLang uses this interface for the KV pool: without ``"interface_v1": 1`` it does, and copies
            each page once more.
    """

    def __init__(self, options: StorageOptions, config: Any, metrics: IoMetrics, *, is_reader: bool) -> None:
        self._options, self._config, self._metrics, self._is_reader = options, config, metrics, is_reader
        self._stores: dict[tuple[str, str, int], NamedStore] = {}
        self._pool: Any = None
        self._sample = torch.empty(0)
        self._lock = threading.Lock()
        self.is_used = not (config.extra_config or {}).get("interface_v1", 0)

    def register(self, pool: Any) -> None:
        """The host pool of the model's KV.

        Raises:
            ConfigError: this interface is used and the pool has no flat pages, or they cannot be stored.
        """
        self._pool = pool
        if self.is_used:
            try:
                self._sample = pool.get_dummy_flat_data_page()
            except (ValueError, NotImplementedError) as error:
                raise ConfigError(
                    f'kvcanary: {type(pool).__name__} needs "interface_v1": 1 in the extra config ({error})'
                ) from error
            self._find(KV, self._sample)

    def get(self, keys: Sequence[str], targets: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Fill tensors; None for each miss."""
        found: list[torch.Tensor | None] = [None] * len(keys)
        for store, numbers in self._group(keys, targets):
            with self._metrics.batch("prefetch", store.geometry.payload_bytes) as done:
                pieces = [(targets[n] if targets[n].nbytes else bytearray(MARKER_BYTES),) for n in numbers]
                for n, verdict in zip(numbers, store.get([keys[n] for n in numbers], pieces), strict=True):
                    found[n] = targets[n] if verdict.ok else None
                    done.append(verdict.ok)
        return found

    def set(self, keys: Sequence[str], values: Sequence[torch.Tensor]) -> list[bool]:
        """Store tensors."""
        stored = [False] * len(keys)
        for store, numbers in self._group(keys, values):
            with self._metrics.batch("backup", store.geometry.payload_bytes) as done:
                names = [keys[n] for n in numbers]
                markers = map(make_marker, store.name_pages(names))
                pieces = [
                    (values[n].contiguous() if values[n].nbytes else marker,)
                    for n, marker in zip(numbers, markers, strict=True)
                ]
                done += store.set(names, pieces)
                for n, is_stored in zip(numbers, done, strict=True):
                    stored[n] = is_stored
        return stored

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which pages of the KV pool, or of side pools met before, are stored."""
        present = [False] * len(keys)
        for n, key in enumerate(keys):
            pool = pool_of(key)
            if pool != KV:
                with self._lock:
                    stores = [store for (name, _, _), store in self._stores.items() if name == pool]
                present[n] = any(store.exists([key])[0] for store in stores)
        own = [n for n, key in enumerate(keys) if pool_of(key) == KV]
        if own and self.is_used:
            found = self._find(KV, self._sample).exists([keys[n] for n in own])
            for n, is_present in zip(own, found, strict=True):
                present[n] = is_present
        return present

    def all(self) -> list[NamedStore]:
        """Every store that is open."""
        with self._lock:
            return list(self._stores.values())

    def _group(self, keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> list[tuple[NamedStore, list[int]]]:
        groups: dict[tuple[str, torch.dtype, int], list[int]] = {}
        for n, (key, tensor) in enumerate(zip(keys, tensors, strict=True)):
            groups.setdefault((pool_of(key), tensor.dtype, tensor.nbytes), []).append(n)
        return [(self._find(pool, tensors[ns[0]]), ns) for (pool, _, _), ns in groups.items()]

    def _find(self, pool: str, tensor: torch.Tensor) -> NamedStore:
        kind = (pool, str(tensor.dtype), tensor.nbytes)
        with self._lock:
            if kind not in self._stores:
                fields = describe_identity(self._config, self._pool, pool, "tensor", self._options.identity)
                fields |= {"dtype": str(tensor.dtype)}
                geometry = make_geometry(fields, tensor.nbytes or MARKER_BYTES)
                capacity = self._options.capacity_bytes
                main = next((store for (name, _, _), store in self._stores.items() if name == KV), None)
                if pool != KV and main is not None and main.slot_count:
                    capacity = Layout(geometry.payload_bytes, 0, main.slot_count).file_bytes
                self._stores[kind] = NamedStore(
                    self._options, geometry, pool, capacity, self._config.tp_rank, self._is_reader
                )
            return self._stores[kind]


def pool_of(key: str) -> str:
    """The pool that a key of this interface belongs to."""
    suffix = key.rpartition(".")[2]
    return suffix if suffix in _SIDE_POOLS else KV
