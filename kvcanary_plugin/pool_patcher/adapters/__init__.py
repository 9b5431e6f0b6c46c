"""From SGLang's KV pools to the spaces, sources and fingerprint that the engine works with.

A pool is known by what it is made of, not by its class: a subclass with the same buffers is covered, one with a buffer
that no adapter reads is refused by the name of that buffer.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import UncoveredError
from ..scales import NONE, read_scales
from ..spaces import FOLLOWED, GuardedPool, SlotSpace, StateSpace, list_needs
from .allocators import COVERED_ALLOCATORS, count_slots, list_allocator_gaps
from .catalogue import COVERED_POOLS
from .deepseek_v4 import draft_deepseek_v4_pool
from .draft import PoolDraft, SlotDraft
from .hybrid import draft_hybrid_pool
from .leftovers import refuse_leftovers
from .qsa import draft_qsa_pool
from .rows import PLACEHOLDERS, read_rows
from .sparse import draft_sparse_pool
from .unified import refuse_unified
from .window import draft_window_pool

__all__ = [
    "COVERED_ALLOCATORS",
    "COVERED_POOLS",
    "GuardedPool",
    "SlotSpace",
    "StateSpace",
    "adapt_model_runner",
    "adapt_pool",
    "draft_pool",
    "list_gaps",
]


def list_gaps(pool: object, allocator: object, request_pool: object = None, window: int | None = None) -> list[str]:
    """Why this pool and allocator cannot be followed; empty if they can. See :func:`draft_pool`."""
    gaps = []
    try:
        draft_pool(pool, allocator, request_pool, window)
    except UncoveredError as error:
        gaps.append(str(error))
    return gaps + list_allocator_gaps(allocator)


def adapt_model_runner(model_runner: Any, content: str) -> GuardedPool:
    """The pool of a ``ModelRunner`` whose pools exist.

    Args:
        model_runner: SGLang's runner after its memory pools were allocated.
        content: ``none``, ``partial`` or ``all``.

    Raises:
        UncoveredError: names what this version does not cover.
    """
    pool, allocator = model_runner.token_to_kv_pool, model_runner.token_to_kv_pool_allocator
    request_pool, window = model_runner.req_to_token_pool, getattr(model_runner, "sliding_window_size", None)
    if gaps := list_gaps(pool, allocator, request_pool, window):
        raise UncoveredError("; ".join(gaps))
    guarded = adapt_pool(
        pool,
        allocator,
        request_pool.req_to_token,
        content,
        model=str(model_runner.model_config.model_path),
        scales=read_scales(model_runner.model),
        request_pool=request_pool,
        window=window,
    )
    if missing := [why for need, why in list_needs(guarded).items() if need not in FOLLOWED]:
        raise UncoveredError(f"KV pool {type(pool).__name__} is known but not followed yet: {'; '.join(missing)}")
    return guarded


def adapt_pool(
    pool: Any,
    allocator: Any,
    req_to_token: torch.Tensor,
    content: str,
    *,
    model: str,
    scales: str = NONE,
    request_pool: Any = None,
    window: int | None = None,
) -> GuardedPool:
    """Spaces and sources of ``pool``.

    Args:
        pool, allocator: SGLang's objects.
        req_to_token: int32 (row_count, context), the live table of slots of the main space.
        content: ``none``, ``partial`` or ``all``.
        model: which model the KV belongs to.
        scales: fingerprint of what quantised KV was divided by.
        request_pool: SGLang's request table, where requests have a state besides slots.
        window: positions before the current one that sliding-window layers attend to, if there are such layers.

    Raises:
        UncoveredError: the pool is not covered.
    """
    draft = draft_pool(pool, allocator, request_pool, window)
    device = req_to_token.device
    return GuardedPool(
        name=draft.name,
        kv_cache=pool,
        allocator=draft.main.allocator,
        req_to_token=req_to_token,
        main=draft.main.finish(content, device),
        fingerprint=(("model", model), ("dtype", str(pool.dtype)), ("scales", scales), ("layout", draft.layout())),
        companions=tuple(space.finish(content, device) for space in draft.companions),
        states=tuple(state.finish(content, device) for state in draft.states),
    )


def draft_pool(pool: Any, allocator: Any, request_pool: Any = None, window: int | None = None) -> PoolDraft:
    """What ``pool`` is made of. Arguments as for :func:`adapt_pool`.

    Raises:
        UncoveredError: it is not covered; the message names the buffer or the property in the way.
    """
    refuse_unified(pool)
    roots = [("KV pool", pool)]
    if hasattr(pool, "compress_state_pools"):
        draft = draft_deepseek_v4_pool(pool, allocator, window)
    elif hasattr(pool, "swa_kv_pool"):
        draft = draft_window_pool(pool, allocator, window)
    elif hasattr(pool, "mamba_pool"):
        draft_parts = draft_qsa_pool if hasattr(pool, "qsa_compress_ratio") else draft_hybrid_pool
        draft = draft_parts(pool, allocator, request_pool)
        roots.append(("request table", request_pool))
    elif hasattr(pool, "main_pool"):
        draft = draft_sparse_pool(pool, allocator)
    else:
        rows = read_rows(pool)
        main = SlotDraft("full", rows.parts, rows.slot_count, rows.page_size, allocator=allocator)
        draft = PoolDraft("rows", main) if rows.stores else PoolDraft("nothing stored", main, unchecked=PLACEHOLDERS)
    _refuse_foreign_slots(pool, draft)
    refuse_leftovers(roots, draft)
    return draft


def _refuse_foreign_slots(pool: Any, draft: PoolDraft) -> None:
    """An allocator with more slots than the pool has rows means that slots are looked up somewhere on the way."""
    for space in (draft.main, *draft.companions):
        if space.allocator is None:
            handed_out = -(-draft.main.slot_count // space.ratio)
        else:
            handed_out = count_slots(space.allocator, int(space.allocator.page_size))
        if handed_out > space.slot_count:
            raise UncoveredError(
                f"KV pool {type(pool).__name__} has {space.slot_count} slots in space {space.name!r}, but its "
                f"allocator hands out {handed_out}: slots must be translated on the way"
            )
