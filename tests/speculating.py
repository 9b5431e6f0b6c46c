"""A scheduler in miniature that speculates: SGLang's own workers, sampler, allocation, tree and pool, guarded.

The workers' methods run as they are. What is missing on a CPU are their kernels, for which there are plain stand-ins
here, a model, whose next token follows from the one before, and drafts, some of which guess it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.allocator import paged
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative import eagle_utils, eagle_worker_v2, spec_utils
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.triton_ops import cache_locs

from kvcanary_plugin.config import CHECKS, Config
from kvcanary_plugin.patches import allocators, moves, ownership
from kvcanary_plugin.patches.speculation import count_nodes, read_forward, read_trees, tell_commits
from kvcanary_plugin.pool_patcher.patch import PatchSet
from kvcanary_plugin.runtime.guard import Guard
from kvcanary_plugin.runtime.session import Session
from kvcanary_plugin.runtime.violation import Violation
from kvcanary_plugin.versions import installed_sglang
from tests.bookkeeping import NaiveKernel, _extend
from tests.engine import ListReporter

CONTEXT, VOCABULARY, LAYERS = 512, 97, 2


def follow(token: torch.Tensor) -> torch.Tensor:
    """What the model says comes next."""
    return (token * 31 + 17) % VOCABULARY


def _assign_rows(rows, table, starts, ends, values, *_: Any) -> None:
    place = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = values[place : place + end - start].to(table.dtype)
        place += end - start


def _read_rows(rows, table, starts, ends, out, *_: Any) -> None:
    place = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        out[place : place + end - start] = table[row, start:end]
        place += end - start


def _read_rows_of(req_pool_indices, req_to_token, start_offset, end_offset, batch_size, draft_token_num, device):
    out = torch.zeros(batch_size * draft_token_num, dtype=torch.int64)
    _read_rows(req_pool_indices, req_to_token, start_offset, end_offset, out)
    return out


def _fill_accepted(accept_index, out_cache_loc, out, *_: Any) -> None:
    chosen = accept_index.flatten()
    chosen = chosen[chosen >= 0].long()
    out[: len(chosen)] = out_cache_loc[chosen]


def _fill_bonus(accept_tokens, accept_lens, out, stride) -> None:
    out[:] = accept_tokens.flatten()[torch.arange(len(accept_lens)) * stride + accept_lens - 1]


def _verify_greedily(
    predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling,
    target_predict, topk=-1,
):  # fmt: skip
    for i in range(len(candidates)):
        node, length = 0, 0
        accept_index[i, 0] = retrieve_index[i, 0]
        predicts[retrieve_index[i, 0]] = target_predict[i, 0]
        child = int(retrieve_next_token[i, 0])
        while child >= 0 and length + 1 < accept_index.shape[1]:
            if candidates[i, child] == target_predict[i, node]:
                node, length = child, length + 1
                accept_index[i, length] = retrieve_index[i, node]
                predicts[retrieve_index[i, node]] = target_predict[i, node]
                child = int(retrieve_next_token[i, node])
            else:
                child = int(retrieve_next_sibling[i, child])
        accept_token_num[i] = length
    return predicts, accept_index, accept_token_num


def _find_links(tree_mask, lengths, positions, index, first_child, next_sibling, bs, nodes) -> None:
    """Depth and links of nodes from who their ancestors are."""
    mask = tree_mask.view(bs, nodes, nodes)
    index[:] = torch.arange(bs * nodes).view(bs, nodes)
    first_child[:], next_sibling[:] = -1, -1
    for i in range(bs):
        last: dict[int, int] = {}
        for node in range(nodes):
            above = [other for other in range(node) if mask[i, node, other]]
            positions[i * nodes + node] = lengths[i] + len(above)
            if not node:
                continue
            parent = above[-1]
            if parent in last:
                next_sibling[i, last[parent]] = node
            else:
                first_child[i, parent] = node
            last[parent] = node


def stand_in_for_kernels() -> ModuleType:
    """The worker's module, which cannot be imported without the package of its kernels."""
    if "sgl_kernel" not in sys.modules:
        package, module = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.speculative")
        module.reconstruct_indices_from_tree_mask = _find_links  # type: ignore[attr-defined]
        sys.modules["sgl_kernel"], sys.modules["sgl_kernel.speculative"] = package, module
        try:
            from sglang.srt.speculative import ngram_worker
        finally:
            del sys.modules["sgl_kernel"], sys.modules["sgl_kernel.speculative"]
    else:
        from sglang.srt.speculative import ngram_worker
    return ngram_worker


class Drafts:
    """Random trees: parents before children, some children guess right, siblings differ."""

    def __init__(self, nodes: int, width: int, luck: float) -> None:
        self.nodes, self.width, self.luck = nodes, width, luck
        self.random = torch.Generator().manual_seed(1)

    def tree(self, root: int) -> tuple[list[int], list[int]]:
        """Tokens and parents."""
        tokens, parents = [root], [0]
        children: dict[int, set[int]] = {}
        while len(tokens) < self.nodes:
            oldest = max(0, len(tokens) - self.width)
            parent = int(torch.randint(oldest, len(tokens), (1,), generator=self.random))
            guess = int(follow(torch.tensor(tokens[parent])))
            if torch.rand(1, generator=self.random) > self.luck or guess in children.get(parent, ()):
                guess = int(torch.randint(VOCABULARY, (1,), generator=self.random))
            if guess in children.setdefault(parent, set()):
                continue
            children[parent].add(guess)
            tokens.append(guess)
            parents.append(parent)
        return tokens, parents

    def mask(self, parents: Sequence[int]) -> torch.Tensor:
        """Who sees whom: itself and all above."""
        mask = torch.eye(self.nodes, dtype=torch.bool)
        for node in range(1, self.nodes):
            mask[node] |= mask[parents[node]]
        return mask

    # What the worker asks of its corpus.

    def batch_get(self, _: Any, batch_tokens: Sequence[Sequence[int]], __: Any):
        trees = [self.tree(tokens[-1]) for tokens in batch_tokens]
        mask = torch.cat([self.mask(parents).flatten() for _, parents in trees]).numpy()
        return torch.tensor([token for tokens, _ in trees for token in tokens]).numpy(), mask

    def synchronize(self) -> None: ...

    def batch_put(self, _: Any) -> None: ...

    def erase_match_state(self, _: Any) -> None: ...


class Speculating:
    """``algorithm``: ``ngram`` (trees), ``eagle`` (trees) or ``chain`` (no tree). ``close`` undoes what was patched."""

    def __init__(
        self,
        algorithm: str = "ngram",
        *,
        nodes: int = 6,
        luck: float = 0.7,
        overlap: bool = True,
        page_size: int = 1,
        size: int = 1024,
        **options: Any,
    ) -> None:
        self.algorithm, self.nodes, self.overlap, self.page_size = algorithm, nodes, overlap, page_size
        self._undo: list[Callable[[], None]] = []
        self._count = 0
        self._random = torch.Generator().manual_seed(0)
        self.drafts = Drafts(nodes, 1 if algorithm == "chain" else 4, luck)
        self._stand_in()
        config = Config(
            **{"mode": "log", "scrub_budget": 0.1, "checks": tuple(c for c in CHECKS if c != "order"), **options}
        )
        self.session = Session(config)
        self.reporter = self.session.reporter = ListReporter()
        areas = (allocators, ownership, moves)
        self._patches = PatchSet([patch for area in areas for patch in area.declare_patches(self.session)])
        self._patches.install(installed_sglang())

        dtype = torch.bfloat16
        self.pool = MHATokenToKVPool(size, page_size, dtype, 2, 16, LAYERS, "cpu", False)
        kind = TokenToKVPoolAllocator if page_size == 1 else PagedTokenToKVPoolAllocator
        paging = () if page_size == 1 else (page_size,)
        self.allocator = kind(size, *paging, dtype, "cpu", self.pool, False)
        self.rows = ReqToTokenPool(16, CONTEXT, "cpu", False)
        runner = SimpleNamespace(
            token_to_kv_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.rows,
            model=torch.nn.Identity(),
            model_config=SimpleNamespace(model_path="test"),
            mambaish_config=None,
            spec_algorithm=SimpleNamespace(is_standalone=lambda: True),
            decode_cuda_graph_runner=None,
        )
        self.session.attach(runner, [], rank=0, has_drafts=True)
        self.tree = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
            )
        )
        self.worker = self._make_worker(SimpleNamespace(model_runner=runner, forward_batch_generation=self._verify))
        self.running: list[Req] = []
        self._carried: dict[str, tuple[int, list[int]]] = {}  # what the device knows ahead of the host
        self._last: tuple[Any, list[Req]] | None = None
        self.rounds = self.accepted = self.accepted_last = 0

    @property
    def guard(self) -> Guard:
        assert self.session.guard is not None, self.reporter.events
        return self.session.guard

    @property
    def violations(self) -> list[Violation]:
        return self.reporter.violations

    def close(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._patches.uninstall()

    # What a scheduler does.

    def request(self, length: int = 0, *, tokens: Sequence[int] | None = None) -> Req:
        if tokens is None:
            tokens = torch.randint(VOCABULARY, (length,), generator=self._random).tolist()
        self._count += 1
        return Req(f"r{self._count}", "", array("q", tokens), SamplingParams(max_new_tokens=400))

    def prefill(self, *requests: Req) -> None:
        """Prompts, as far as they are not cached; their first token is sampled."""
        for request in requests:
            request.init_next_round_input(self.tree)
            self.tree.inc_lock_ref(request.last_node)
            request.kv_committed_freed = request.kv_overallocated_freed = False
            request.set_extend_range(len(request.prefix_indices), len(request.full_untruncated_fill_ids))
            self.running.append(request)
        lengths = [request.extend_range.end for request in requests]
        batch = self._batch(requests, lengths)
        batch.prefix_lens = [len(request.prefix_indices) for request in requests]
        batch.extend_lens = [request.extend_range.length for request in requests]
        batch.extend_num_tokens = sum(batch.extend_lens)
        slots, rows, _ = common.alloc_for_extend(batch)
        ids = [list(request.origin_input_ids) + list(request.output_ids) for request in requests]
        for request, length in zip(requests, lengths, strict=True):
            request.kv_committed_len = request.kv_allocated_len = length
        given = (list(requests), [r.req_pool_idx for r in requests], batch.prefix_lens, batch.extend_lens)
        tokens = [t for all_, s, e in zip(ids, batch.prefix_lens, lengths, strict=True) for t in all_[s:e]]
        self._launch(list(requests))
        self.session.announce(lambda it: it, given)
        self.session.before(torch.tensor(tokens), slots.to(torch.int64), torch.as_tensor(rows))
        self._store(slots)
        self.session.after()
        result = SimpleNamespace(accept_lens=None)
        self.session.note_launched(result)
        self._settle_last()
        self.session.settle(result)
        for request, known in zip(requests, ids, strict=True):
            request.output_ids.append(int(follow(torch.tensor(known[-1]))))
            self._carried[request.rid] = (request.kv_committed_len, [])
            common.maybe_cache_unfinished_req(request, self.tree)

    def round(self, *, finish: Sequence[Req] = ()) -> None:
        """Verify drafts for everything that runs; under overlap the result of the round before is processed after."""
        batch = self._batch(self.running, [self._carried[r.rid][0] for r in self.running])
        batch.forward_mode = ForwardMode.DECODE
        batch.req_pool_indices = torch.tensor([request.req_pool_idx for request in self.running])
        eagle_utils.eagle_prepare_for_decode(batch)
        self._launch(batch.reqs)
        scheduler = SimpleNamespace(spec_algorithm=SimpleNamespace(is_none=lambda: False), draft_worker=self.worker)
        self.session.announce(lambda it: read_trees(it, lambda r: r.req_pool_idx, count_nodes(scheduler, it)), batch)
        result = self._forward(batch)
        self.session.note_launched(result)
        if not self.overlap:
            self._last = (result, list(self.running))
        kept, self._last = self._last, (result, list(self.running)) if self.overlap else None
        self._process(kept, finish)
        lens, tokens = result.accept_lens.tolist(), result.next_token_ids.view(-1, self.nodes).tolist()
        for request, length, path in zip(batch.reqs, lens, tokens, strict=True):
            before, _ = self._carried[request.rid]
            self._carried[request.rid] = (before + length, path[:length])
        self.rounds += len(lens)
        self.accepted += sum(lens)
        self.accepted_last = sum(lens)

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.round()

    def finish(self, request: Req) -> None:
        request.finished_reason = "done"
        common.release_kv_cache(request, self.tree)
        self.running.remove(request)

    def retract(self, request: Req) -> None:
        common.release_kv_cache(request, self.tree, is_insert=False)
        request.reset_for_retract()
        self.running.remove(request)

    def drain(self) -> None:
        """Process what was launched last."""
        self._settle_last()

    def cover(self) -> None:
        """Forwards of nothing until the rotating pass has seen everything twice."""
        self.drain()
        for _ in range(2 * (self.guard.scrubber.period_forwards + 1)):
            result = object()
            self.session.announce(lambda it: it, ([], [], [], []))
            empty = torch.zeros(0, dtype=torch.int64)
            self.session.before(empty, empty, empty)
            self.session.after()
            self.session.note_launched(result)
            self.session.settle(result)

    def _launch(self, requests: list[Req]) -> None:
        if self.session.policy is not None:
            self.session.policy.note_launched(requests)

    def _settle_last(self) -> None:
        kept, self._last = self._last, None
        self._process(kept, ())

    def _process(self, kept: tuple[Any, list[Req]] | None, finish: Sequence[Req]) -> None:
        if kept is None:
            return
        result, requests = kept
        self.session.settle(result)
        tokens = result.next_token_ids.view(-1, self.nodes).tolist()
        for request, length, path in zip(requests, result.accept_lens.tolist(), tokens, strict=True):
            if request.finished_reason is not None or request.req_pool_idx is None:
                continue
            request.kv_committed_len += length
            request.output_ids.extend(path[:length])
            if request in finish:
                self.finish(request)

    def _batch(self, requests: Sequence[Req], lengths: list[int]) -> Any:
        carried = [self._carried.get(request.rid, (0, []))[1] for request in requests]
        drafts = SimpleNamespace(
            accept_tokens=torch.tensor([(path + [0] * self.nodes)[: self.nodes] for path in carried]).flatten(),
            accept_lens=torch.tensor([len(path) for path in carried], dtype=torch.int32),
        )
        nothing = dict.fromkeys(("acc_additive_penalties", "acc_scaling_penalties", "logit_bias"))
        return SimpleNamespace(
            reqs=list(requests),
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            seq_lens_sum=sum(lengths),
            device="cpu",
            tree_cache=self.tree,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            model_config=SimpleNamespace(is_encoder_decoder=False, vocab_size=VOCABULARY),
            maybe_evict_swa=lambda: None,
            batch_size=lambda: len(requests),
            sampling_info=SimpleNamespace(
                penalizer_orchestrator=SimpleNamespace(is_required=False), is_all_greedy=True, **nothing
            ),
            spec_info=drafts,
            has_grammar=False,
            return_logprob=False,
            input_ids=None,
            out_cache_loc=None,
        )

    # What a worker and a model do.

    def _make_worker(self, target: Any) -> Any:
        session: Any = self.session
        if self.algorithm == "ngram":
            kind = tell_commits(stand_in_for_kernels().NGRAMWorker, session)
            worker = kind.__new__(kind)
            worker.device, worker.max_batch_size = "cpu", 16
            worker.ngram_corpus, worker.max_trie_depth = self.drafts, 8
            worker.enable_overlap, worker._prev_decode_rids = self.overlap, set()
            worker.draft_token_num = self.nodes
            worker._init_preallocated_tensors()
        else:
            kind = tell_commits(eagle_worker_v2.EAGLEWorkerV2, session)
            worker = kind.__new__(kind)
            worker.device, worker.plan_stream, worker.plan_stream_ctx = "cpu", None, nullcontext()
            worker.topk = 1 if self.algorithm == "chain" else 4
            worker.speculative_num_steps = self.nodes - 1
            worker.req_to_token_pool = self.rows
        worker._target_worker, worker.token_to_kv_pool_allocator = target, self.allocator
        worker.speculative_num_draft_tokens = self.nodes
        return worker

    def _forward(self, batch: Any) -> Any:
        if self.algorithm == "ngram":
            return self.worker.forward_batch_generation(batch)
        bs, nodes = len(batch.reqs), self.nodes
        roots = [(*request.output_ids, *self._carried[request.rid][1])[-1] for request in batch.reqs]
        if not self.overlap:
            roots = [request.output_ids[-1] for request in batch.reqs]
        trees = [self.drafts.tree(root) for root in roots]
        mask = torch.cat([self.drafts.mask(parents).flatten() for _, parents in trees])
        positions = torch.zeros(bs * nodes, dtype=torch.int64)
        index, child, sibling = torch.zeros((3, bs, nodes), dtype=torch.int64)
        _find_links(mask, batch.seq_lens, positions, index, child, sibling, bs, nodes)
        batch.spec_info = EagleVerifyInput(
            torch.tensor([token for tokens, _ in trees for token in tokens]),
            mask, positions, index, child, sibling, None, nodes - 1, self.worker.topk, nodes, None, None, None,
        )  # fmt: skip
        return self.worker.verify(batch)

    def _verify(self, batch: Any = None, *, forward_batch: Any = None, is_verify: bool) -> Any:
        """The target model verifies drafts."""
        assert is_verify
        forward = self._forward_batch(batch) if forward_batch is None else forward_batch
        self.session.before(forward.input_ids, forward.out_cache_loc, forward.req_pool_indices, read_forward(forward))
        self._store(forward.out_cache_loc)
        self.session.after()
        says = torch.nn.functional.one_hot(follow(forward.input_ids), VOCABULARY).float()
        return SimpleNamespace(
            logits_output=SimpleNamespace(next_token_logits=says, hidden_states=None),
            can_run_cuda_graph=False,
            routed_experts_output=None,
            indexer_topk_output=None,
        )

    @staticmethod
    def _forward_batch(batch: Any, _: Any = None) -> ForwardBatch:
        return ForwardBatch(
            forward_mode=batch.forward_mode,
            batch_size=len(batch.reqs),
            input_ids=batch.input_ids,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=batch.out_cache_loc,
            seq_lens_sum=batch.seq_lens_sum,
            positions=batch.spec_info.positions,
            spec_info=batch.spec_info,
        )

    def _store(self, slots: torch.Tensor) -> None:
        for layer in range(LAYERS):
            k, v = torch.randn((2, len(slots), 2, 16), generator=self._random).to(self.pool.dtype)
            self.pool.set_kv_buffer(SimpleNamespace(layer_id=layer), slots, k, v)

    def _stand_in(self) -> None:
        args = SimpleNamespace(
            page_size=self.page_size,
            speculative_algorithm="NGRAM",
            speculative_num_steps=self.nodes - 1,
            speculative_eagle_topk=1,
            max_speculative_num_draft_tokens=self.nodes,
            speculative_use_rejection_sampling=False,
            strip_thinking_cache=False,
            dcp_size=1,
            enable_mamba_extra_buffer=lambda: False,
        )
        ngram_worker = stand_in_for_kernels()
        for owner, name, value in (
            (get_context(), "_server_args", args),
            (paged, "alloc_extend_kernel", NaiveKernel(_extend)),
            (common, "support_triton", lambda backend: False),
            (eagle_utils, "get_last_loc", common.get_last_loc_torch),
            (cache_locs, "assign_req_to_token_pool", NaiveKernel(_assign_rows)),
            (cache_locs, "assign_extend_cache_locs_func", _read_rows_of),
            (ngram_worker, "assign_extend_cache_locs_func", _read_rows_of),
            (spec_utils, "assign_extend_cache_locs", NaiveKernel(_read_rows)),
            (spec_utils, "fill_accept_out_cache_loc", NaiveKernel(_fill_accepted)),
            (eagle_utils, "verify_tree_greedy_func", _verify_greedily),
            (eagle_utils, "maybe_build_dsv4_verify_bundle", lambda *_: None),
            (eagle_worker_v2, "fill_bonus_tokens", NaiveKernel(_fill_bonus)),
            (eagle_worker_v2, "record_stream_for_v2_verify", lambda *_: None),
            (eagle_worker_v2, "record_stream_each", lambda *_: None),
            (ngram_worker, "record_stream_for_v2_verify", lambda *_: None),
            (ForwardBatch, "init_new", staticmethod(self._forward_batch)),
        ):
            kept = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
            setattr(owner, name, value)
            self._undo.append(lambda owner=owner, name=name, kept=kept: setattr(owner, name, kept))  # type: ignore[misc]
