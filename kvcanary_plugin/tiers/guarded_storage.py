"""A guard around any storage backend of SGLang: what comes back is verified in the host pages before it is used.

The digests are made from the host pages before the backend stores them, and kept beside (see
:mod:`~kvcanary_plugin.tiers.digest_store`), so that nothing about the backend has to change. A page that does not
verify is reported as missing, with all after it. Nothing the backend raises reaches SGLang's I/O threads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName, PoolTransferResult

from .digest_store import DigestStore, open_digests
from .hf3fs.client import view_bytes
from .hf3fs.identity import describe_identity, make_geometry
from .host_pages import HostPages, open_host_pages
from .page_check import PageCheck
from .page_records import in_use

logger = logging.getLogger("kvcanary")

Answer = TypeVar("Answer")

SETTING = "kvcanary_digests"
KV = str(PoolName.KV)
LOCAL_BACKENDS = ("file",)  # whose store belongs to this host unless the operator says otherwise


def guard_storage(make: Callable[[], Any], name: str, config: Any) -> Any:
    """The backend that ``make`` gives, guarded; one that verifies by itself is returned as it is.

    Args:
        make: SGLang's own way to make the backend.
        name: of the backend.
        config: SGLang's ``HiCacheStorageConfig``. ``kvcanary_digests`` in its extra config is the address of the
            digests, a path or ``redis://...``, and says that all who store in this backend use it.
    """
    extra = config.extra_config or {}
    where = extra.pop(SETTING, None)
    backend = make()
    if getattr(backend, "verifies_pages", False):
        return backend
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcanary"
    digests = open_digests(str(where or cache / "digests" / f"{name}.sqlite"))
    is_exclusive = bool(where) or name in LOCAL_BACKENDS
    if not is_exclusive:
        logger.warning(
            'kvcanary: guarding storage backend "%s" with digests of this host alone: pages that other hosts have '
            'stored there are misses, and a page that does not fit is one too but is not reported. Set "%s" in '
            "--hicache-storage-backend-extra-config to a redis:// that all of them use, or to a path if this host is "
            "the only one",
            name,
            SETTING,
        )
    logger.info('kvcanary: guarding storage backend "%s"', name)
    return GuardedStorage(backend, name, config, digests, is_exclusive=is_exclusive)


class GuardedStorage:
    """Behaves like the backend it is around, except that wrong pages are missing. Everything else is passed through."""

    def __init__(self, backend: Any, name: str, config: Any, digests: DigestStore, *, is_exclusive: bool) -> None:
        self.backend = backend
        self.errors = 0
        self._name, self._config, self._digests, self._is_exclusive = name, config, digests, is_exclusive
        self._pages: dict[str, HostPages] = {}
        self._checks: dict[str, PageCheck] = {}
        self._pool: Any = None
        self._is_closed = False

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.backend, attribute)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The host pool of the model's KV. Raises ``UncoveredError`` if its pages cannot be seen."""
        self.backend.register_mem_pool_host(mem_pool_host)
        self._pool = mem_pool_host
        self._add_pool(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A side pool. Raises like :meth:`register_mem_pool_host`."""
        self.backend.register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add_pool(str(host_pool_name), host_pool)

    def _add_pool(self, name: str, pool: Any) -> None:
        self._pages[name] = open_host_pages(pool)
        self._checks[name] = self._make_check(name, pool, self._pages[name].order)

    def _make_check(self, name: str, pool: Any, order: str) -> PageCheck:
        identity = make_geometry(describe_identity(self._config, pool, name, order, {"backend": self._name}), 1).digest
        place = f'backend "{self._name}"'
        return PageCheck(
            self._digests,
            identity,
            pool=name,
            rank=self._config.tp_rank,
            place=place,
            is_exclusive=self._is_exclusive,
        )

    # By host indices

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store pages of the KV pool."""
        try:
            with in_use(self._pool, host_indices):
                self._checks[KV].note(keys, self._pages[KV].sources(host_indices), self._is_new)
                return as_list(self.backend.batch_set_v1(keys, host_indices, extra_info), len(keys))
        except Exception:
            return self._fail("batch_set_v1", [False] * len(keys))

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Fill pages of the KV pool."""
        try:
            with in_use(self._pool, host_indices):
                found = as_list(self.backend.batch_get_v1(keys, host_indices, extra_info), len(keys))
                return self._verify(KV, keys, host_indices, found)
        except Exception:
            return self._fail("batch_get_v1", [False] * len(keys))

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of several pools."""
        try:
            with self._in_use(transfers):
                for t in transfers:
                    self._checks[str(t.name)].note(
                        t.keys, self._pages[str(t.name)].sources(t.host_indices), lambda key: False
                    )
                stored = self.backend.batch_set_v2(transfers, extra_info)
            return {t.name: as_list(stored.get(t.name), len(t.keys)) for t in transfers}
        except Exception:
            return self._fail("batch_set_v2", {t.name: [False] * len(t.keys or []) for t in transfers})

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Fill pages of several pools."""
        try:
            with self._in_use(transfers):
                found = self.backend.batch_get_v2(transfers, extra_info)
                return {
                    t.name: self._verify(str(t.name), t.keys, t.host_indices, as_list(found.get(t.name), len(t.keys)))
                    for t in transfers
                }
        except Exception:
            return self._fail("batch_get_v2", {t.name: [False] * len(t.keys or []) for t in transfers})

    def _in_use(self, transfers: Sequence[Any]) -> AbstractContextManager[None]:
        kv = [t.host_indices for t in transfers if str(t.name) == KV and t.host_indices is not None]
        return in_use(self._pool, torch.cat(kv)) if kv else nullcontext()

    def _verify(self, pool: str, keys: Sequence[str], host_indices: torch.Tensor, found: list[bool]) -> list[bool]:
        pages = self._pages[pool].sources(host_indices)
        asked = [page if is_found else None for page, is_found in zip(pages, found, strict=True)]
        good = self._checks[pool].verify(keys, asked)
        first_bad = next((n for n in range(len(keys)) if found[n] and not good[n]), len(keys))
        for n in range(first_bad, len(keys)):
            if found[n]:
                wipe(pages[n])
                self._pages[pool].accept(host_indices, n, pages[n])
        return [is_good and n < first_bad for n, is_good in enumerate(good)]

    # By tensors

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a tensor."""
        try:
            self._check_of(value).note([key], [(value.contiguous(),)], self._is_new)
            return bool(self.backend.set(key, value, target_location, target_sizes))
        except Exception:
            return self._fail("set", False)

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store tensors."""
        try:
            if keys:
                self._check_of(values[0]).note(keys, [(value.contiguous(),) for value in values], self._is_new)
            return bool(self.backend.batch_set(keys, values, target_locations, target_sizes))
        except Exception:
            return self._fail("batch_set", False)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Fetch a tensor."""
        try:
            return self._verify_tensors([key], [self.backend.get(key, target_location, target_sizes)])[0]
        except Exception:
            return self._fail("get", None)

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        """Fetch tensors."""
        try:
            found = self.backend.batch_get(keys, target_locations, target_sizes)
            if isinstance(found, int):  # so many of the first ones are in their targets
                found = [*target_locations[:found], *[None] * (len(keys) - found)]
            return self._verify_tensors(keys, list(found or [None] * len(keys)))
        except Exception:
            return self._fail("batch_get", [None] * len(keys))

    def _verify_tensors(self, keys: list[str], tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        sample = next((tensor for tensor in tensors if tensor is not None), None)
        if sample is None:
            return tensors
        pages = [None if tensor is None else (tensor.contiguous(),) for tensor in tensors]
        good = self._check_of(sample).verify(keys, pages)
        first_bad = next((n for n in range(len(keys)) if pages[n] is not None and not good[n]), len(keys))
        return [tensor if n < first_bad else None for n, tensor in enumerate(tensors)]

    def _check_of(self, tensor: torch.Tensor) -> PageCheck:
        kind = f"{tensor.dtype}x{tensor.numel()}"
        if kind not in self._checks:
            self._checks[kind] = self._make_check(kind, self._pool, "tensor")
        return self._checks[kind]

    # The rest

    def exists(self, key: str) -> bool:
        """Whether a page is stored."""
        try:
            return bool(self.backend.exists(key))
        except Exception:
            return self._fail("exists", False)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of the first keys are all stored."""
        try:
            return int(self.backend.batch_exists(keys, extra_info))
        except Exception:
            return self._fail("batch_exists", 0)

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """The longest prefix that all pools have."""
        try:
            return self.backend.batch_exists_v2(keys, pool_transfers, extra_info)
        except Exception:
            return self._fail("batch_exists_v2", PoolTransferResult.empty())

    def status(self) -> dict[str, dict[str, int]]:
        """Pages by outcome for each pool, for people and tests."""
        return {name: dict(check.counts) for name, check in list(self._checks.items())}

    def close(self) -> None:
        """Close the backend, if it can be closed, and the digests. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if hasattr(self.backend, "close"):
                self.backend.close()
        finally:
            self._digests.close()

    def _is_new(self, key: str) -> bool:
        try:
            return not self.backend.exists(key)
        except Exception:  # some cannot say
            return False

    def _fail(self, where: str, answer: Answer) -> Answer:
        self.errors += 1
        if self.errors <= 3 or self.errors % 1000 == 0:
            logger.exception('kvcanary: %s of backend "%s" failed; counted as a miss', where, self._name)
        return answer


HiCacheStorage.register(GuardedStorage)


def as_list(answer: Any, count: int) -> list[bool]:
    """One truth value a page, whatever a backend makes of it.

    Some answer with one value for all, some with one each for K and V, and some with fewer than were asked for.
    """
    if answer is None or isinstance(answer, bool):
        return [bool(answer)] * count
    values = [bool(value) for value in answer]
    if count and len(values) == 2 * count:
        values = [k and v for k, v in zip(values[::2], values[1::2], strict=True)]
    return (values + [False] * count)[:count]


def wipe(pieces: Sequence[Any]) -> None:
    """Zero the bytes of a page that must not be used."""
    for piece in pieces:
        np.frombuffer(view_bytes(piece), np.uint8)[:] = 0
