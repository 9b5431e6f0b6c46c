"""Several threads for one batch: each takes the next shard until none is left."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")
SHARD_BYTES = 32 << 20


class Crew:
    """``threads`` that work on a batch, the caller being one of them."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"threads={threads}: at least 1")
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "kvcanary-pages") if threads > 1 else None

    def run(self, count: int, entry_bytes: int, work: Callable[[slice], list[Result]]) -> list[Result]:
        """Call ``work`` for shards of ``count`` entries and put its results together, in order."""
        size = max(1, min(-(-count // self._threads), SHARD_BYTES // entry_bytes))
        if self._pool is None or size >= count:
            return work(slice(0, count))
        shards = [slice(first, min(first + size, count)) for first in range(0, count, size)]
        results: list[list[Result]] = [[]] * len(shards)
        remaining = iter(enumerate(shards))  # next() on it is atomic: each shard has one taker

        def take() -> None:
            for number, shard in remaining:
                results[number] = work(shard)

        helpers = [self._pool.submit(take) for _ in range(min(self._threads, len(shards)) - 1)]
        take()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
        return [result for shard in results for result in shard]

    def close(self) -> None:
        """Wait for what is under way and end the threads. The caller's own thread still works."""
        if self._pool:
            self._pool.shutdown()
            self._pool = None
