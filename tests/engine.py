"""A scheduler and a forward in miniature around the real pool, allocator, request table, requests and radix-free rows.

Only the model is missing: a forward stores random K and V through the pool's own setter.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams

from kvcanary_plugin.config import CHECKS, Config
from kvcanary_plugin.pool_patcher.adapters import adapt_pool
from kvcanary_plugin.report.reporter import Reporter
from kvcanary_plugin.runtime.guard import Guard
from kvcanary_plugin.runtime.violation import Violation

CONTEXT = 256
# Ownership has tests of its own, on the allocators' and the tree's own calls.
WITHOUT_OWNERSHIP = tuple(check for check in CHECKS if check != "ownership")
VOCABULARY = 1000


class ListReporter(Reporter):
    """Keeps what was reported."""

    def __init__(self) -> None:
        super().__init__()
        self.violations: list[Violation] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def report(self, violations: list[Violation]) -> list[Violation]:
        fresh = super().report(violations)
        self.violations += fresh
        return fresh

    def event(self, name: str, fields: dict[str, Any]) -> None:
        self.events.append((name, fields))


class Engine:
    """Prefill, decode and finish requests on a real pool, guarded."""

    def __init__(
        self,
        *,
        page_size: int = 1,
        size: int = 512,
        layers: int = 3,
        heads: int = 2,
        head_dim: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        mode: str = "log",
        latent: bool = False,
        **options: Any,
    ) -> None:
        if latent:
            self.pool = MLATokenToKVPool(size, page_size, dtype, head_dim, 8, layers, "cpu", False)
        else:
            self.pool = MHATokenToKVPool(size, page_size, dtype, heads, head_dim, layers, "cpu", False)
        if page_size == 1:
            self.allocator = TokenToKVPoolAllocator(size, dtype, "cpu", self.pool, False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(size, page_size, dtype, "cpu", self.pool, False)
        self.rows = ReqToTokenPool(16, CONTEXT, "cpu", False)
        self.reporter = ListReporter()
        options.setdefault("checks", WITHOUT_OWNERSHIP)
        config = Config(mode=mode, **options)
        content = config.content if config.reads_rows else "none"
        guarded = adapt_pool(self.pool, self.allocator, self.rows.req_to_token, content, model="test")
        self.guard = Guard(guarded, config, self.reporter)
        self.random = torch.Generator().manual_seed(0)
        self.page_size = page_size
        self._count = 0

    @property
    def violations(self) -> list[Violation]:
        return self.reporter.violations

    def request(self, length: int = 0, *, tokens: list[int] | None = None, extra_key: str | None = None) -> Req:
        """A new request that is not running yet."""
        if tokens is None:
            tokens = torch.randint(VOCABULARY, (length,), generator=self.random).tolist()
        self._count += 1
        return Req(f"r{self._count}", "", array("q", tokens), SamplingParams(max_new_tokens=64), extra_key=extra_key)

    def prefill(self, *requests: Req, prefix: torch.Tensor | None = None, upto: int | None = None) -> None:
        """One extend forward. ``prefix``: cached slots shared by new requests; ``upto``: end of this chunk."""
        if waiting := [request for request in requests if request.req_pool_idx is None]:
            self.rows.alloc(waiting)
        starts, ends = [], []
        for request in requests:
            start = request.kv_committed_len
            if start == 0 and prefix is not None:
                start = len(prefix)
                self.rows.req_to_token[request.req_pool_idx, :start] = prefix.int()
            starts.append(start)
            ends.append(min(upto or CONTEXT, len(request.origin_input_ids) + len(request.output_ids)))
        self.forward(requests, starts, ends, ForwardMode.EXTEND)

    def decode(self, *requests: Req) -> None:
        """One decode forward; each request first gets the token that the last forward sampled."""
        starts = []
        for request in requests:
            request.output_ids.append(int(torch.randint(VOCABULARY, (1,), generator=self.random)))
            starts.append(request.kv_committed_len)
        self.forward(requests, starts, [start + 1 for start in starts], ForwardMode.DECODE)

    def run(self, *requests: Req, steps: int = 5) -> None:
        """Several decode forwards."""
        for _ in range(steps):
            self.decode(*requests)

    def forward(self, requests: Any, starts: list[int], ends: list[int], mode: ForwardMode) -> None:
        """Announce, allocate, verify, store, record, settle: in the order of SGLang's loop."""
        written = [end - start for start, end in zip(starts, ends, strict=True)]
        slots = self._allocate(requests, starts, ends)
        if self.guard.ledger is not None:
            self.guard.ledger.note_alloc(slots)
        tokens: list[int] = []
        for request, start, end, chunk in zip(requests, starts, ends, slots.split(written), strict=True):
            tokens += (list(request.origin_input_ids) + list(request.output_ids))[start:end]
            self.rows.req_to_token[request.req_pool_idx, start:end] = chunk.int()
        rows = [request.req_pool_idx for request in requests]
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=torch.tensor(tokens),
            req_pool_indices=torch.tensor(rows),
            seq_lens=torch.tensor(ends),
            out_cache_loc=slots,
            seq_lens_sum=sum(ends),
        )
        result = object()
        self.guard.announce(requests, rows, starts, written)
        self.guard.before(batch.input_ids, batch.out_cache_loc, batch.req_pool_indices)
        self.store(slots)
        batch.input_ids.clamp_(max=1)  # as multimodal models do during the forward
        self.guard.after()
        self.guard.note_launched(result)
        self.guard.settle(result)
        for request, end in zip(requests, ends, strict=True):
            request.kv_committed_len = end

    def store(self, slots: torch.Tensor) -> None:
        """What the layers of a model do."""
        is_latent = isinstance(self.pool, MLATokenToKVPool)
        row = (1, self.pool.kv_cache_dim) if is_latent else (self.pool.head_num, self.pool.head_dim)
        for layer in range(self.pool.layer_num):
            shape = (len(slots), *row)
            k, v = (torch.randn(shape, generator=self.random).to(self.pool.dtype) for _ in range(2))
            self.pool.set_kv_buffer(SimpleNamespace(layer_id=layer), slots, k, v)

    def finish(self, request: Req, *, keep: int = 0) -> torch.Tensor:
        """Free all but the first ``keep`` slots, which stay as a cached prefix and are returned, and the row."""
        slots = self.slots_of(request)
        self.guard.traffic.release(slots[keep:])
        self.allocator.free(slots[keep:])
        self.rows.free_slots.append(request.req_pool_idx)
        if self.guard.ledger is not None:
            self.guard.ledger.note_free(slots[keep:])
            self.guard.ledger.note_row_free(request.req_pool_idx)
        request.req_pool_idx = None
        return slots[:keep]

    def slots_of(self, request: Req) -> torch.Tensor:
        """Slots of the committed tokens."""
        return self.rows.req_to_token[request.req_pool_idx, : request.kv_committed_len].long().clone()

    def settle_scrub(self) -> None:
        """Idle forwards until the rotating pass has covered the pool twice."""
        for _ in range(2 * (self.guard.scrubber.period_forwards + 1)):
            self.forward([], [], [], ForwardMode.IDLE)

    def _allocate(self, requests: Any, starts: list[int], ends: list[int]) -> torch.Tensor:
        total = sum(ends) - sum(starts)
        if self.page_size == 1:
            return self.allocator.alloc(total) if total else torch.zeros(0, dtype=torch.int64)
        last = [
            int(self.rows.req_to_token[request.req_pool_idx, start - 1]) if start else -1
            for request, start in zip(requests, starts, strict=True)
        ]
        # The allocator launches a Triton kernel here; SGLang's own plain version of it gives the same slots.
        free = self.allocator.free_pages
        out = torch.zeros(total, dtype=torch.int64)
        alloc_extend_naive(
            torch.tensor(starts), torch.tensor(ends), torch.tensor(last), free, out, self.page_size, "cpu"
        )
        pages = sum(
            -(-end // self.page_size) - -(-start // self.page_size) for start, end in zip(starts, ends, strict=True)
        )
        self.allocator.free_pages = free[pages:]
        return out
