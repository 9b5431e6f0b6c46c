"""The engine in miniature with the policy of mode ``quarantine`` and SGLang's own radix cache."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from kvcanary_plugin.patches.quarantine import make_levers
from kvcanary_plugin.runtime.burst import Burst
from kvcanary_plugin.runtime.consensus import Consensus
from kvcanary_plugin.runtime.policy import Quarantine
from tests.engine import Engine

LEVERS = make_levers(lambda request: request, "inflight_middle_chunks")


class QuarantinedEngine(Engine):
    """Acts upon every verdict, and frees through the policy, as the patches of a server do."""

    def __init__(self, *, group: Any = None, clock: Any = None, **options: Any) -> None:
        super().__init__(mode="quarantine", **options)
        guard = self.guard
        burst = Burst(clock) if clock is not None else None
        self.tree = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=self.page_size,
            )
        )
        self.policy = Quarantine(guard, self.reporter, LEVERS, Consensus(group), self.tree, burst)
        guard.settings.set_mode("quarantine", self.policy)
        allocator_free = self.allocator.free
        self.allocator.free = lambda slots: allocator_free(self.policy.keep_back(self.allocator, slots))

    def forward(self, requests: Any, starts: Any, ends: Any, mode: Any) -> None:
        self.policy.note_launched(requests)
        super().forward(requests, starts, ends, mode)
        self.policy.act()

    def look_up(self, request: Any) -> int:
        """What SGLang does when it is about to schedule ``request``: how many cached tokens it finds."""
        self.policy.admit(request)
        key = RadixKey(request.origin_input_ids, request.extra_key)
        match = self.tree.match_prefix(MatchPrefixParams(key=key))
        request.last_node, request.prefix_indices = match.last_device_node, match.device_indices
        request.cache_protected_len = len(match.device_indices)
        self.tree.inc_lock_ref(request.last_node)
        return len(match.device_indices)

    def start(self, *requests: Any) -> None:
        """Schedule and prefill each by itself, and put its prompt into the tree unless that is forbidden."""
        for request in requests:
            found = self.look_up(request)
            request.cached_tokens = found
            self.prefill(request, prefix=request.prefix_indices if found else None)
            request.full_untruncated_fill_ids = request.origin_input_ids
            if not request.skip_radix_cache_insert:
                request.set_extend_range(found, len(request.origin_input_ids))
                self.tree.cache_unfinished_req(request)

    def conclude(self, request: Any) -> None:
        """What SGLang does with the result of a request that ends."""
        request.update_finish_state()
        assert request.finished()
        slots = self.slots_of(request)
        request.pop_committed_kv_cache = lambda: request.kv_committed_len  # the rest of it asks for a running server
        self.guard.traffic.release(slots[request.cache_protected_len :])
        self.tree.cache_finished_req(request, is_insert=not request.skip_radix_cache_insert)
        self.rows.free(request)

    @property
    def free_slots(self) -> set[int]:
        """Slots that may be handed out."""
        pages = torch.cat([self.allocator.free_pages, self.allocator.release_pages])
        return {int(page) * self.page_size + i for page in pages for i in range(self.page_size)}

    def flip(self, slot: int, layer: int = 1) -> None:
        """Damage one bit of V."""
        self.pool.v_buffer[layer].view(torch.int16)[slot, 0, 3] ^= 1 << 7
