"""SGLang's hierarchical cache on a CPU: real pools, allocators, host pools, controller and tree, guarded.

What a CPU lacks is provided here: copies between device and host rows, and memory that is not pinned. Rows come back
while the forward runs, as they do on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.managers import cache_controller
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache import common, hiradix_cache, memory_pool_host
from sglang.srt.mem_cache.allocator import paged
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.runtime_context import get_context

from kvcanary_plugin.config import Config
from kvcanary_plugin.patches import allocators, hierarchical, ownership
from kvcanary_plugin.pool_patcher.adapters import adapt_pool
from kvcanary_plugin.pool_patcher.patch import PatchSet
from kvcanary_plugin.runtime.guard import Guard
from kvcanary_plugin.runtime.session import Session
from kvcanary_plugin.runtime.violation import Violation
from kvcanary_plugin.versions import installed_sglang

from .bookkeeping import CONTEXT, Bookkeeping, Launched, NaiveKernel, _decode, _extend
from .engine import ListReporter
from .host_copies import COPIES

LAYERS = 3


class Gate:
    """An event of the device; transfers are over while it is open."""

    is_open = True

    def record(self, _: Any = None) -> None: ...

    def wait(self, _: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return Gate.is_open


class Stream(torch.cpu.Stream):
    """That of a CPU, on which everything is over when it is waited for."""

    def wait_event(self, _: Gate) -> None: ...


class Hierarchy(Bookkeeping):
    """One scheduler with a hierarchical cache. ``close`` undoes what was patched.

    Attributes:
        between: called once, between the copies of a load and their comparison.
        layers_lost: layers that loads leave out.
    """

    def __init__(
        self,
        *,
        kind: str = "mha",
        page_size: int = 1,
        size: int = 128,
        ratio: float = 4.0,
        policy: str = "write_through",
        io_backend: str = "direct",
        layout: str = "layer_first",
        mode: str = "log",
        **options: Any,
    ) -> None:
        Gate.is_open = True
        self.page_size = page_size
        self.running: list[Req] = []
        self.layers_lost: tuple[int, ...] = ()
        self.between: Callable[[], None] | None = None
        self._count = 0
        self._random = torch.Generator().manual_seed(0)
        self._undo: list[Callable[[], None]] = []
        self._coming: list[Callable[[], None]] = []
        self.session = Session(Config(mode=mode, **options))
        self.reporter = self.session.reporter = ListReporter()
        areas = (allocators, ownership, hierarchical)
        self._patches = PatchSet(patch for area in areas for patch in area.declare_patches(self.session))
        self._patches.install(installed_sglang())
        self._replace(paged, "alloc_extend_kernel", NaiveKernel(_extend))
        self._replace(paged, "alloc_decode_kernel", NaiveKernel(_decode))
        self._replace(common, "support_triton", lambda backend: False)
        for name, copy in COPIES.items():
            self._replace(memory_pool_host, name, copy, may_be_missing=True)
        device = SimpleNamespace(Event=Gate, Stream=torch.cpu.Stream, stream=torch.cpu.stream, current_stream=Stream)
        self._replace(cache_controller, "device_module", device)
        find = hiradix_cache.get_mha_host_pool_cls
        self._replace(hiradix_cache, "get_mha_host_pool_cls", lambda pool: partial(find(pool), pin_memory=False))
        host = hiradix_cache.MLATokenToKVPoolHost
        self._replace(hiradix_cache, "MLATokenToKVPoolHost", partial(host, pin_memory=False))
        args = SimpleNamespace(page_size=page_size, speculative_algorithm=None, strip_thinking_cache=False, dcp_size=1)
        self._replace(get_context(), "_server_args", args)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            self._undo.append(dist.destroy_process_group)

        dtype = torch.bfloat16
        if kind == "mha":
            self.pool: Any = MHATokenToKVPool(size, page_size, dtype, 2, 8, LAYERS, "cpu", False)
        else:
            ranks = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "layer_num": LAYERS, "device": "cpu"}
            self.pool = MLATokenToKVPool(size, page_size, dtype, enable_memory_saver=False, **ranks)
        allocator = TokenToKVPoolAllocator if page_size == 1 else PagedTokenToKVPoolAllocator
        sizes = (size,) if page_size == 1 else (size, page_size)
        self.allocator = allocator(*sizes, dtype, "cpu", self.pool, False)
        self.rows = ReqToTokenPool(16, CONTEXT, "cpu", False)
        config = self.session.config
        content = config.content if config.reads_rows else "none"
        guarded = adapt_pool(self.pool, self.allocator, self.rows.req_to_token, content, model="test")
        self.guard = self.session.guard = Guard(guarded, config, self.reporter)
        self.ledger = self.guard.ledger
        settings = SimpleNamespace(
            hicache_ratio=ratio, hicache_size=0, hicache_mem_layout=layout, hicache_io_backend=io_backend,
            hicache_write_policy=policy, hicache_storage_backend=None, hicache_storage_prefetch_policy="best_effort",
            hicache_storage_backend_extra_config=None, served_model_name="test", extra_metric_labels=None,
        )  # fmt: skip
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            tp_cache_group=dist.group.WORLD,
        )
        self.tree = hiradix_cache.HiRadixCache(params, settings)
        self.tree.load_back_threshold = 0
        self.controller = self.tree.cache_controller
        self.host = self.controller.mem_pool_host
        load = self.host.load_to_device_per_layer
        self.host.load_to_device_per_layer = lambda *arguments, **kw: self._coming.append(
            partial(load, *arguments, **kw)
        )

    def close(self) -> None:
        self.tree.shutdown()
        super().close()

    @property
    def transfers(self) -> Any:
        return self.guard.traffic.transfers

    @property
    def violations(self) -> list[Violation]:
        return self.reporter.violations

    def _replace(self, owner: Any, name: str, value: Any, *, may_be_missing: bool = False) -> None:
        if may_be_missing and not hasattr(owner, name):
            setattr(owner, name, value)
            self._undo.append(lambda: delattr(owner, name))
        else:
            super()._replace(owner, name, value)

    # What a scheduler does.

    def prefill(self, *requests: Req, upto: int | None = None) -> Launched:
        """Schedule and launch prompts, of which what host memory has is loaded."""
        self.tree.check_hicache_events()
        for request in requests:
            if request.req_pool_idx is None:
                request.init_next_round_input(self.tree)
                if request.host_hit_length > 0:
                    params = InitLoadBackParams(request.best_match_node, request.host_hit_length, req=request)
                    loaded, request.last_node = self.tree.init_load_back(params)
                    request.prefix_indices = torch.cat([request.prefix_indices, loaded])
                    request.cache_protected_len = len(request.prefix_indices)
                self.tree.inc_lock_ref(request.last_node)
                request.kv_committed_freed = request.kv_overallocated_freed = False
                self.running.append(request)
            end = min(upto or CONTEXT, len(request.full_untruncated_fill_ids))
            request.set_extend_range(len(request.prefix_indices), end)
        self.controller.layer_done_counter.set_consumer(self.tree.ready_to_load_host_cache())
        lengths = [request.extend_range.end for request in requests]
        batch = self._batch(requests, lengths)
        batch.prefix_lens = [len(request.prefix_indices) for request in requests]
        batch.extend_lens = [request.extend_range.length for request in requests]
        batch.extend_num_tokens = sum(batch.extend_lens)
        slots, _, _ = common.alloc_for_extend(batch)
        for request, length in zip(requests, lengths, strict=True):
            request.kv_committed_len = request.kv_allocated_len = length
        return self._launch(list(requests), batch.prefix_lens, batch.extend_lens, slots, is_prefill=True)

    def decode(self, *requests: Req, slots_of: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Launched:
        self.tree.flush_write_through_acks()
        return super().decode(*requests, slots_of=slots_of)

    def serve(self, tokens: Sequence[int], *, steps: int = 1, **options: Any) -> Req:
        """One request from its prompt to its end."""
        request = self.request(tokens=list(tokens), **options)
        self.process(self.prefill(request))
        self.step_through(request, steps=steps)
        self.process(self.decode(request), finish=[request])
        return request

    def push_out(self) -> None:
        """Have the tree give up every device slot that it can; what is copied stays in host memory."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.tree.check_hicache_events()
        self.tree.evict(EvictParams(num_tokens=self.pool.size))

    def nodes_of(self, tokens: Sequence[int]) -> list[Any]:
        """Nodes of the tree that hold these tokens, from the root on."""
        node, nodes, key = self.tree.root_node, [], list(tokens)
        while key:
            node = next((child for child in node.children.values() if child.key.token_ids[0] == key[0]), None)
            if node is None:
                break
            nodes.append(node)
            key = key[len(node.key.token_ids) :]
        return nodes

    def host_slots_of(self, tokens: Sequence[int]) -> list[int]:
        return [slot for node in self.nodes_of(tokens) for slot in node.host_value.tolist()]

    def _launch(
        self,
        requests: list[Req],
        starts: list[int],
        counts: list[int],
        slots: torch.Tensor,
        *,
        is_prefill: bool = False,
    ) -> Launched:
        tokens: list[int] = []
        for request, start, count in zip(requests, starts, counts, strict=True):
            tokens += (list(request.origin_input_ids) + list(request.output_ids))[start : start + count]
        rows = [request.req_pool_idx for request in requests]
        result = object()
        self.session.announce(lambda _: (requests, rows, starts, counts), None)
        self.session.before(torch.tensor(tokens), slots.to(torch.int64), torch.tensor(rows))
        for load in self._coming:
            if load.args[3] not in self.layers_lost:
                load()
        self._coming.clear()
        self.read_layers()
        self.controller.layer_done_counter.set_consumer(-1)
        self.store(slots.to(torch.int64))
        between, self.between = self.between, None
        if between is not None:
            between()
        self.session.after()
        self.session.note_launched(result)
        self.session.settle(result)
        return Launched(requests, is_prefill)

    def read_layers(self) -> None:
        """The layers of a model ask for their rows."""
        for layer in range(LAYERS):
            self.pool.get_key_buffer(layer)

    def store(self, slots: torch.Tensor) -> None:
        """What the layers of a model do."""
        for layer in range(LAYERS):
            buffers = (
                [self.pool.kv_buffer] if hasattr(self.pool, "kv_buffer") else [self.pool.k_buffer, self.pool.v_buffer]
            )
            for buffer in buffers:
                shape = (len(slots), *buffer[layer].shape[1:])
                buffer[layer][slots] = torch.randn(shape, generator=self._random).to(buffer[layer].dtype)
