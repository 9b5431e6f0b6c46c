"""What SGLang's metrics collector asks a storage backend for: pages a batch and GB/s, since it last asked."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

_GB = 2**30  # what SGLang's own backends call a gigabyte
_MAX_PENDING = 4096  # batches that nobody collects are forgotten


class IoMetrics:
    """Off unless ``enabled``: then each batch adds two numbers."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._lock = threading.Lock()
        self._pending: dict[str, list[tuple[int, float]]] = {"prefetch": [], "backup": []}

    @contextlib.contextmanager
    def batch(self, direction: str, page_bytes: int) -> Iterator[list[bool]]:
        """Time a batch. The caller extends the list that it is given by one truth value a page."""
        done: list[bool] = []
        start = time.perf_counter()
        yield done
        pages = sum(done)
        if self._enabled and pages:
            rate = pages * page_bytes / _GB / max(time.perf_counter() - start, 1e-9)
            with self._lock:
                pending = self._pending[direction]
                pending.append((pages, rate))
                del pending[:-_MAX_PENDING]

    def collect(self) -> Any:
        """SGLang's ``StorageMetrics`` of all batches since the last call; None if metrics are off."""
        if not self._enabled:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            prefetch, backup = (self._pending[name] for name in ("prefetch", "backup"))
            self._pending = {"prefetch": [], "backup": []}
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in prefetch],
            backup_pgs=[pages for pages, _ in backup],
            prefetch_bandwidth=[rate for _, rate in prefetch],
            backup_bandwidth=[rate for _, rate in backup],
        )
