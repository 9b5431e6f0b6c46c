"""The miniature engine with tiny rows of KV, and as many slots, request rows and positions as are asked for."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool

from kvcanary_plugin.config import CHECKS, Config
from kvcanary_plugin.pool_patcher.adapters import adapt_pool
from kvcanary_plugin.runtime.guard import Guard
from tests.engine import Engine, ListReporter

MILLION = 1 << 20
CHUNK = 1 << 16
LARGE_POOL = 1 << 24


def make_sparse_table(rows: int, context: int) -> torch.Tensor:
    """int32 zeros of which only the pages that somebody writes to take memory."""
    memory = mmap.mmap(-1, rows * context * 4)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.int32).reshape(rows, context))


class LargeEngine(Engine):
    """One layer of K and V, or of latent rows of ``latent`` + 8 elements, 16 bits each."""

    def __init__(
        self,
        *,
        size: int,
        rows: int = 4,
        context: int = MILLION + 64,
        page_size: int = 1,
        latent: int = 0,
        **options: Any,
    ) -> None:
        dtype = torch.bfloat16
        if latent:
            self.pool = MLATokenToKVPool(size, page_size, dtype, latent, 8, 1, "cpu", False)
        else:
            self.pool = MHATokenToKVPool(size, page_size, dtype, 1, 8, 1, "cpu", False)
        if page_size == 1:
            self.allocator = TokenToKVPoolAllocator(size, dtype, "cpu", self.pool, False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(size, page_size, dtype, "cpu", self.pool, False)
        self.rows = ReqToTokenPool(rows, 1, "cpu", False)
        self.rows.req_to_token = make_sparse_table(rows + 1, context)
        self.reporter = ListReporter()
        options.setdefault("checks", CHECKS)
        config = Config(mode="log", **options)
        guarded = adapt_pool(self.pool, self.allocator, self.rows.req_to_token, config.content, model="test")
        self.guard = Guard(guarded, config, self.reporter)
        self.random = torch.Generator().manual_seed(0)
        self.page_size = page_size
        self._count = 0

    def leave(self, count: int) -> None:
        """Somebody has all slots but the last ``count``."""
        self.allocator.alloc(self.allocator.available_size() - count)

    def leave_last_row(self) -> None:
        """Somebody has all request rows but the last one."""
        self.rows.free_slots = self.rows.free_slots[-1:]

    def prefill_in_chunks(self, request: Req, chunk: int = CHUNK) -> None:
        for end in range(chunk, len(request.origin_input_ids) + chunk, chunk):
            self.prefill(request, upto=min(end, len(request.origin_input_ids)))

    def slot_of(self, request: Req, position: int) -> int:
        return int(self.rows.req_to_token[request.req_pool_idx, position])

    def swap(self, request: Req, one: int, other: int) -> None:
        row = self.rows.req_to_token[request.req_pool_idx]
        row[[one, other]] = row[[other, one]]

    def found_since(self, count: int) -> set[tuple[str, str, int, int | None]]:
        return {(v.check, v.kind, v.slot, v.position) for v in self.violations[count:]}
