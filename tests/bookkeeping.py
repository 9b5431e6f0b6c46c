"""SGLang's own bookkeeping of slots, around a ledger: allocators, request rows, requests, radix tree and release.

Everything runs as in the scheduler, the functions that allocate for a batch and release a request included; there is
just no model, and a forward stores nothing but its positions.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.allocator import paged
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache, SWAChunkCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams

from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.backend import NUMPY, Backend
from kvcanary_plugin.kernels.violations import ViolationBuffer
from kvcanary_plugin.patches.ownership import declare_patches
from kvcanary_plugin.pool_patcher.patch import PatchSet
from kvcanary_plugin.pool_patcher.records import ShadowRecords
from kvcanary_plugin.runtime.ledger import Ledger
from kvcanary_plugin.runtime.ownership import Finding, explain_rows
from kvcanary_plugin.versions import installed_sglang

CONTEXT = 256
VOCABULARY = 1000


class NaiveKernel:
    """SGLang's plain version of a kernel that needs a GPU, launched the same way."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._call


def _extend(prefix_lens, seq_lens, last_loc, free_pages, out, _, page_size):
    alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out, page_size, "cpu")


def _decode(seq_lens, last_loc, free_pages, out, _, page_size):
    alloc_extend_naive(seq_lens - 1, seq_lens, last_loc, free_pages, out, page_size, "cpu")


@dataclass
class Launched:
    """A forward that was launched and whose result is not processed yet."""

    requests: list[Req]
    is_prefill: bool
    findings: list[Finding] = field(default_factory=list)


class Bookkeeping:
    """One scheduler's worth of slots. ``close`` undoes what was patched."""

    def __init__(
        self,
        *,
        page_size: int = 1,
        size: int = 512,
        tree: str = "radix",
        window: int = 0,
        backend: Backend = NUMPY,
        rows_are_sound: bool = False,
    ) -> None:
        self.page_size, self.window = page_size, window
        self.step = 0
        self.rows_are_sound = rows_are_sound
        self.strike: Callable[[Any], Callable[[], None] | None] | None = None  # a fault for the next forward
        self.findings: list[Finding] = []
        self.running: list[Req] = []
        self._count = 0
        self._random = torch.Generator().manual_seed(0)
        self._undo: list[Callable[[], None]] = []
        self.ledger: Ledger | None = None
        self._patches = PatchSet(declare_patches(self))  # type: ignore[arg-type]
        self._patches.install(installed_sglang())
        self._replace(paged, "alloc_extend_kernel", NaiveKernel(_extend))
        self._replace(paged, "alloc_decode_kernel", NaiveKernel(_decode))
        self._replace(common, "support_triton", lambda backend: False)
        args = SimpleNamespace(page_size=page_size, speculative_algorithm=None, strip_thinking_cache=False, dcp_size=1)
        self._replace(get_context(), "_server_args", args)

        self.rows = ReqToTokenPool(32, CONTEXT, "cpu", False)
        dtype = torch.bfloat16
        if window:
            pool = SWAKVPool(size, size, page_size, dtype, 1, 8, [0], [1], "cpu")
            self.allocator = SWATokenToKVPoolAllocator(size, size, page_size, dtype, "cpu", pool, False)
        elif page_size == 1:
            self.allocator = TokenToKVPoolAllocator(size, dtype, "cpu", None, False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(size, page_size, dtype, "cpu", None, False)
        self.records = ShadowRecords(size + page_size, page_size, "cpu")
        self.violations = ViolationBuffer(256, "cpu")
        self.ledger = Ledger(
            allocator=getattr(self.allocator, "full_attn_allocator", self.allocator),
            req_to_token=self.rows.req_to_token,
            records=self.records,
            backend=backend,
            window=window,
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            sliding_window_size=window or None,
        )
        self.tree = {"radix": RadixCache, "chunk": SWAChunkCache if window else ChunkCache}[tree](params)

    def close(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._patches.uninstall()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        kept = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, kept))

    def note_ownership(self, subject: object, action: Callable[[Ledger], None]) -> None:
        """What a session does for the patches."""
        if self.ledger is not None and self.ledger.follows(subject):
            action(self.ledger)

    # What a scheduler does.

    def request(self, length: int = 0, *, tokens: Sequence[int] | None = None, extra_key: str | None = None) -> Req:
        """A request that is not running yet."""
        if tokens is None:
            tokens = torch.randint(VOCABULARY, (length,), generator=self._random).tolist()
        self._count += 1
        return Req(f"r{self._count}", "", array("q", tokens), SamplingParams(max_new_tokens=64), extra_key=extra_key)

    def prefill(self, *requests: Req, upto: int | None = None) -> Launched:
        """Schedule and launch the (next chunk of the) prompt of each request."""
        for request in requests:
            if request.req_pool_idx is None:
                request.init_next_round_input(self.tree)
                self.tree.inc_lock_ref(request.last_node)
                request.kv_committed_freed = request.kv_overallocated_freed = False
                self.running.append(request)
            end = min(upto or CONTEXT, len(request.full_untruncated_fill_ids))
            request.set_extend_range(len(request.prefix_indices), end)
        lengths = [request.extend_range.end for request in requests]
        batch = self._batch(requests, lengths)
        batch.prefix_lens = [len(request.prefix_indices) for request in requests]
        batch.extend_lens = [request.extend_range.length for request in requests]
        batch.extend_num_tokens = sum(batch.extend_lens)
        slots, _, _ = common.alloc_for_extend(batch)
        for request, length in zip(requests, lengths, strict=True):
            request.kv_committed_len = request.kv_allocated_len = length
        return self._launch(list(requests), batch.prefix_lens, batch.extend_lens, slots, is_prefill=True)

    def stash(self, request: Req) -> None:
        """The next chunk of a prompt is about to be scheduled: keep the last one, launched or not, in the tree."""
        common.maybe_cache_unfinished_req(request, self.tree, chunked=True)
        request.inflight_middle_chunks += 1

    def decode(self, *requests: Req, slots_of: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Launched:
        """Schedule and launch one token for each request. ``slots_of`` changes where the forward is to store."""
        chosen = list(requests) or list(self.running)
        starts = [request.kv_committed_len for request in chosen]
        batch = self._batch(chosen, starts)
        batch.req_pool_indices = torch.tensor([request.req_pool_idx for request in chosen])
        slots = common.alloc_for_decode(batch, 1)
        for request in chosen:
            request.kv_committed_len += 1
            request.kv_allocated_len += 1
        return self._launch(chosen, starts, [1] * len(chosen), slots_of(slots) if slots_of else slots)

    def process(self, launched: Launched, *, finish: Sequence[Req] = ()) -> None:
        """Process the result of a forward, maybe after the next was launched."""
        if not launched.is_prefill:
            self.allocator.free_group_begin()
        for request in launched.requests:
            if request.req_pool_idx is None or request.finished_reason is not None:
                continue  # it was finished or retracted while this forward ran
            if request.inflight_middle_chunks > 0 and launched.is_prefill:
                request.inflight_middle_chunks -= 1
                continue
            request.output_ids.append(int(torch.randint(VOCABULARY, (1,), generator=self._random)))
            if request in finish:
                self.finish(request)
            elif launched.is_prefill:
                common.maybe_cache_unfinished_req(request, self.tree)
        if not launched.is_prefill:
            self.allocator.free_group_end()

    def finish(self, request: Req, *, insert: bool = True) -> None:
        """The request has ended or is aborted."""
        request.finished_reason = "done"
        common.release_kv_cache(request, self.tree, is_insert=insert)
        self.running.remove(request)

    def retract(self, request: Req) -> None:
        """Give up the slots of a running request, which comes back later."""
        common.release_kv_cache(request, self.tree, is_insert=False)
        request.reset_for_retract()
        self.running.remove(request)

    def flush(self) -> None:
        """Drop everything cached, while nothing runs."""
        assert not self.running
        self.tree.reset()
        self.rows.clear()
        self.allocator.clear()

    def step_through(self, *requests: Req, steps: int = 1) -> None:
        """Several decode steps without overlap."""
        for _ in range(steps):
            self.process(self.decode(*requests))

    def slots_of(self, request: Req) -> list[int]:
        """Slots of the tokens of a running request."""
        return self.rows.req_to_token[request.req_pool_idx, : request.kv_committed_len].tolist()

    def _batch(self, requests: Sequence[Req], lengths: list[int]) -> Any:
        return SimpleNamespace(
            reqs=list(requests),
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            device="cpu",
            tree_cache=self.tree,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            maybe_evict_swa=lambda: None,
        )

    # What a guard does.

    def _launch(
        self,
        requests: list[Req],
        starts: list[int],
        counts: list[int],
        slots: torch.Tensor,
        *,
        is_prefill: bool = False,
    ) -> Launched:
        self.step += 1
        rows = np.array([request.req_pool_idx for request in requests], dtype=np.int64)
        owners = torch.from_numpy(self.ledger.seat(self.step, requests, rows, range(len(rows))))
        step = SimpleNamespace(
            number=self.step, requests=requests, rows=rows.tolist(), prefix_lens=starts, write_total=sum(counts)
        )
        strike, self.strike = self.strike, None
        restore = strike(step) if strike is not None else None
        self.ledger.apply(self.step, self.violations)
        prefix_lens = torch.tensor(starts)
        fields = SimpleNamespace(
            prefix_lens=prefix_lens,
            write_offsets=torch.tensor([0, *np.cumsum(counts)]),
            verify_offsets=torch.tensor([0, *np.cumsum(starts)]),
        )
        batch = SimpleNamespace(fields=fields, slots=slots.to(torch.int64), forward_rows=torch.from_numpy(rows))
        self.ledger.check(
            batch=batch,
            step=self.step,
            owners=owners,
            total=sum(starts),
            violations=self.violations,
            rows_are_sound=self.rows_are_sound,
        )
        found = self.violations.rows[: min(int(self.violations.count), self.violations.capacity)].tolist()
        self.violations.reset()
        findings = explain_rows(self.ledger, step, found, self.page_size)  # type: ignore[arg-type]
        self.findings += findings
        positions = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
        inside = (slots >= self.page_size) & (slots < self.records.slot_count)
        self.records.hot[slots[inside], r.IDENTITY] = positions[inside] << 32 | r.LIVE_BIT
        if restore is not None:
            restore()
        return Launched(requests, is_prefill, findings)
