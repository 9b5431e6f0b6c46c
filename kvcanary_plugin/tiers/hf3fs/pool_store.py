"""The store of one host pool of SGLang: pages are named by their indices in the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from .. import page_records
from ..host_pages import HostPages, open_host_pages
from .identity import describe_identity, make_geometry
from .layout import Layout
from .metrics import IoMetrics
from .named_store import NamedStore
from .options import StorageOptions

KV = "kv"  # SGLang's name of the pool whose rows the guard follows
MARKER_BYTES = 16  # what stands in the file for a page of a pool without memory


class PoolStore:
    """Made by :meth:`open`; safe to call from several threads. Raises ``ValueError`` on indices that do not fit."""

    def __init__(self, pages: HostPages, store: NamedStore, metrics: IoMetrics, pool: Any) -> None:
        self._pages, self._store, self._metrics, self._pool = pages, store, metrics, pool

    @classmethod
    def open(
        cls,
        options: StorageOptions,
        config: Any,
        pool: Any,
        name: str,
        metrics: IoMetrics,
        *,
        is_reader: bool,
        slots: int | None,
    ) -> PoolStore:
        """Open the store of ``pool``, with that many ``slots``; None: as many as the capacity gives.

        Raises:
            ConfigError, UncoveredError: it cannot be done; says why.
        """
        pages = open_host_pages(pool)
        fields = describe_identity(config, pool, name, pages.order, options.identity)
        # Room for records whether this server makes them or not: others use the same file.
        records_bytes = page_records.room_for(pages.page_tokens) if name == KV and pages.payload_bytes else 0
        geometry = make_geometry(fields, pages.payload_bytes or MARKER_BYTES, records_bytes)
        capacity = options.capacity_bytes
        if slots is not None:
            capacity = Layout(geometry.payload_bytes, geometry.records_bytes, slots).file_bytes
        return cls(pages, NamedStore(options, geometry, name, capacity, config.tp_rank, is_reader), metrics, pool)

    @property
    def name(self) -> str:
        """Of the pool."""
        return self._store.name

    @property
    def counts(self) -> Counter[str]:
        """Pages by outcome."""
        return self._store.counts

    @property
    def slot_count(self) -> int | None:
        """Pages that fit; None for a reader that has not found its file yet."""
        return self._store.slot_count

    def get(self, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[bool]:
        """Fill the pages at ``host_indices``, ``page_size`` of them for each key."""
        indices = self._check(keys, host_indices)
        slots, host = indices.numpy().reshape(len(keys), -1), self._find_slots()
        with (
            self._metrics.batch("prefetch", self._store.geometry.payload_bytes) as done,
            page_records.in_use(self._pool, indices),
        ):
            targets = self._pages.targets(indices)
            pieces = targets if self._pages.payload_bytes else [(bytearray(MARKER_BYTES),) for _ in keys]
            for number, verdict in enumerate(self._store.get(keys, pieces)):
                if verdict.ok:
                    self._pages.accept(indices, number, targets[number])
                    if host is not None:
                        rows = page_records.decode(verdict.records, host.fingerprint, self._pages.page_tokens)
                        host.supply(slots[number], rows)
                done.append(verdict.ok)
        return done

    def set(self, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[bool]:
        """Store the pages at ``host_indices``, with what the device made of their rows if that is known."""
        indices = self._check(keys, host_indices)
        slots, host = indices.numpy().reshape(len(keys), -1), self._find_slots()
        with (
            self._metrics.batch("backup", self._store.geometry.payload_bytes) as done,
            page_records.in_use(self._pool, indices),
        ):
            pieces: list[Any] = self._pages.sources(indices)
            if not self._pages.payload_bytes:
                pieces = [(make_marker(key),) for key in self._store.name_pages(keys)]
            records: Sequence[bytes] = ()
            if host is not None:
                rows = host.collect(slots.reshape(-1)).reshape(len(keys), self._pages.page_tokens, -1)
                records = [page_records.encode(page, host.fingerprint) for page in rows]
            done += self._store.set(keys, pieces, records)
        return done

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which pages are stored."""
        return self._store.exists(keys)

    def clear(self) -> None:
        """Forget the pages of this process's file."""
        self._store.clear()

    def close(self) -> None:
        """Idempotent."""
        self._store.close()

    def _check(self, keys: Sequence[str], host_indices: torch.Tensor | None) -> torch.Tensor:
        found = 0 if host_indices is None else host_indices.numel()
        if host_indices is None or found != len(keys) * self._pages.page_tokens:
            raise ValueError(
                f"pool {self.name}: {found} host indices for {len(keys)} pages of {self._pages.page_tokens} tokens"
            )
        return host_indices.reshape(-1).cpu().to(torch.int64)

    def _find_slots(self) -> page_records.HostSlots | None:
        return page_records.find(self._pool) if self._store.geometry.records_bytes else None


def make_marker(key: bytes) -> bytes:
    """Stands for a page without bytes. Never all zero, which would look like a hole."""
    return bytes([key[0] | 1]) + key[1:MARKER_BYTES]
