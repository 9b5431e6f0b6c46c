"""Speculative decoding: how many draft tokens a batch verifies, what their trees look like, and when a path is kept.

The draft model's own runner and pool are not guarded: it only proposes tokens, and the target model, which is guarded,
decides. Damage there costs accepted tokens and no correctness.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from kvcanary_plugin.pool_patcher.patch import Patch, fields_of
from kvcanary_plugin.runtime.speculation import Trees
from kvcanary_plugin.versions import installed_sglang

if TYPE_CHECKING:
    from kvcanary_plugin.runtime.session import Session

SPECULATIVE = "sglang.srt.speculative"
ALGORITHM = f"{SPECULATIVE}.spec_info"
SCHEDULER = "sglang.srt.managers.scheduler"
BATCH = "sglang.srt.managers.schedule_batch"
FORWARD = "sglang.srt.model_executor.forward_batch_info"
SINCE, UNTIL = "0.5.15", "0.5.16"  # the releases whose workers were read through
FOLLOWED = ("NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "NEXTN")
# What each worker ends a round with: by then the rows of the accepted path are where they belong.
LAST_STEPS = {"NGRAMWorker": "forward_batch_generation", "EAGLEWorkerV2": "verify", "StandaloneWorkerV2": "verify"}
MADE_UP_LENGTHS = "SGLANG_SIMULATE_ACC_LEN"
READS = (
    *fields_of(
        f"{SPECULATIVE}.ngram_worker", "NGRAMWorker", "forward_batch_generation", "speculative_num_draft_tokens"
    ),
    *fields_of(f"{SPECULATIVE}.eagle_worker_v2", "EAGLEWorkerV2", "verify", "speculative_num_draft_tokens"),
    *fields_of(f"{SPECULATIVE}.ngram_info", "NgramVerifyInput", "retrieve_next_token", "retrieve_next_sibling"),
    *fields_of(f"{SPECULATIVE}.eagle_info", "EagleVerifyInput", "retrieve_next_token", "retrieve_next_sibling"),
    *fields_of(FORWARD, "ForwardBatch", "forward_mode", "positions", "seq_lens", "spec_info"),
    *fields_of(FORWARD, "ForwardMode", "is_decode", "is_target_verify"),
    *fields_of(BATCH, "Req", "kv_committed_len", "kv_allocated_len"),
    *fields_of("sglang.srt.managers.utils", "GenerationBatchResult", "accept_lens", "next_token_ids"),
    *fields_of(SCHEDULER, "Scheduler", "spec_algorithm", "draft_worker"),
)


def is_followed(algorithm: str) -> bool:
    """Whether this algorithm can be followed in the SGLang that is installed."""
    return algorithm.upper() in FOLLOWED and Version(SINCE) <= Version(installed_sglang()) < Version(UNTIL)


def list_draft_gaps(settings: Any) -> list[str]:
    """Why speculation cannot be followed although its algorithm can, one line each."""
    if not getattr(settings, "speculative_algorithm", None):
        return []
    gaps = []
    if getattr(settings, "decoupled_spec_role", "null") not in (None, "null"):
        gaps.append("--decoupled-spec-role is not covered yet (drafts are verified in another server)")
    if float(os.environ.get(MADE_UP_LENGTHS) or 0) > 0:
        gaps.append(f"{MADE_UP_LENGTHS} is not covered (tokens are accepted that were not sampled)")
    if getattr(settings, "enable_hierarchical_cache", False):
        gaps.append("--speculative-algorithm with --enable-hierarchical-cache is not covered yet")
    if getattr(settings, "enable_streaming_session", False):
        gaps.append("--speculative-algorithm with --enable-streaming-session is not covered yet")
    return gaps


def count_nodes(scheduler: Any, batch: Any) -> int:
    """Draft tokens that ``batch`` verifies for each request, 0 for a batch of another kind."""
    if scheduler.spec_algorithm.is_none() or not batch.forward_mode.is_decode() or not batch.reqs:
        return 0
    return int(scheduler.draft_worker.speculative_num_draft_tokens)


def read_trees(
    batch: Any, row_of: Callable[[Any], int], nodes: int
) -> tuple[list[Any], list[int], list[int], list[int], int]:
    """Requests, rows, committed lengths as far as the host knows, new tokens and the size of a tree.

    Under overlap the length on the host is one round behind that of the device, which is not waited for.
    """
    requests = batch.reqs
    committed = [request.kv_committed_len for request in requests]
    return requests, [row_of(request) for request in requests], committed, [nodes] * len(requests), nodes


def read_forward(batch: Any) -> Trees | None:
    """The trees of a ``ForwardBatch``, None where it verifies none."""
    if not batch.forward_mode.is_target_verify():
        return None
    drafts = batch.spec_info
    return Trees(batch.positions, batch.seq_lens, drafts.retrieve_next_token, drafts.retrieve_next_sibling)


def tell_commits(worker: type, session: Session) -> type:
    """``worker``, a class, that says when the rows of an accepted path are where they belong. Others as they are."""
    name = LAST_STEPS.get(worker.__name__)
    if name is None:
        return worker
    last_step = getattr(worker, name)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = last_step(self, *args, **kwargs)
        if result.accept_lens is not None:
            session.commit(result.accept_lens, result.next_token_ids)
        return result

    return type(worker.__name__, (worker,), {name: functools.wraps(last_step)(step), "__module__": worker.__module__})


def declare_patches(session: Session) -> list[Patch]:
    """The class of the worker that SGLang is about to make."""

    def create_worker(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tell_commits(wrapped(*args, **kwargs), session)

    return [
        Patch(
            ALGORITHM,
            "SpeculativeAlgorithm",
            "create_worker",
            create_worker,
            parameters=("self", "server_args"),
            since=SINCE,
            until=UNTIL,
            why="learns which draft tokens were accepted",
            reads=READS,
        )
    ]
