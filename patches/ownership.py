"""Ownership of slots: what the allocators give out and take back, the radix tree takes, and the rows requests leave.

Every way to free a slot ends where ``allocators`` says. Which slots the radix tree holds is known for ``RadixCache``,
SGLang's tree until 0.5.18, and ``ChunkCache``, which holds none. With any other tree requests may share what is given
out; all the rest is checked as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from kvcanary_plugin.pool_patcher.patch import Patch, Wrapper, fields_of

from .allocators import ONE_FILE, PAGED, TOKEN

if TYPE_CHECKING:
    from kvcanary_plugin.runtime.ledger import Ledger
    from kvcanary_plugin.runtime.session import Session

RADIX, CHUNK = "sglang.srt.mem_cache.radix_cache", "sglang.srt.mem_cache.chunk_cache"
SWA, SWA_ALLOCATOR = f"{ONE_FILE}.swa", "SWATokenToKVPoolAllocator"
ROWS = "sglang.srt.mem_cache.memory_pool"
KNOWN_TREES = ("RadixCache", "ChunkCache", "SWAChunkCache")
UNTIL_UNIFIED = "0.5.19"  # the first release whose tree is UnifiedRadixCache


def declare_patches(session: Session) -> list[Patch]:
    """Allocators, request rows and the radix tree."""
    areas = (_declare_allocators, _declare_windows, _declare_rows, _declare_trees)
    return [patch for declare in areas for patch in declare(session)]


def _declare_allocators(session: Session) -> list[Patch]:
    def alloc(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots = wrapped(*args, **kwargs)
        session.note_ownership(instance, lambda ledger: ledger.note_alloc(slots))
        return slots

    def free(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots = args[0] if args else kwargs["free_index"]
        session.note_ownership(instance, lambda ledger: ledger.note_free(slots))
        return wrapped(*args, **kwargs)

    def release_page_ids(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots = torch.cat(args) * instance.page_size  # a page is known by its first slot
        session.note_ownership(instance, lambda ledger: ledger.note_free(slots))
        return wrapped(*args, **kwargs)

    def begin_group(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session.note_ownership(instance, lambda ledger: ledger.begin_group())
        return wrapped(*args, **kwargs)

    def end_group(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session.note_ownership(instance, lambda ledger: ledger.end_group())
        result = wrapped(*args, **kwargs)
        session.note_ownership(instance, lambda ledger: ledger.close_group())
        return result

    def clear(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session.note_ownership(instance, lambda ledger: ledger.note_flush())
        return wrapped(*args, **kwargs)

    def declare(owner: str, module: str, since: str, until: str | None, free_until: str | None) -> list[Patch]:
        group_until = until or free_until
        return [
            Patch(module, owner, "alloc", alloc, ("self", "need_size"), "learns who is given a slot", since, until),
            Patch(
                module, owner, "free", free, ("self", "free_index"), "learns which slots are free", since, free_until
            ),
            Patch(module, owner, "free_group_begin", begin_group, ("self",), "frees are held back", since, group_until),
            Patch(module, owner, "free_group_end", end_group, ("self",), "and come all at once", since, group_until),
            Patch(module, owner, "clear", clear, ("self",), "frees every slot after a flush", since, until),
        ]

    def declare_paged(module: str, since: str, until: str | None) -> list[Patch]:
        why = "learns who is given a slot"
        return [
            Patch(module, PAGED, "alloc_extend", alloc, ("self", "prefix_lens"), why, since, until),
            Patch(module, PAGED, "alloc_decode", alloc, ("self", "seq_lens"), why, since, until),
        ]

    token, paged = f"{ONE_FILE}.token", f"{ONE_FILE}.paged"
    return [
        *declare(TOKEN, ONE_FILE, "0.5.11", "0.5.13", "0.5.13"),
        *declare(PAGED, ONE_FILE, "0.5.11", "0.5.13", "0.5.13"),
        *declare_paged(ONE_FILE, "0.5.11", "0.5.13"),
        *declare(TOKEN, token, "0.5.13", None, None),
        *declare(PAGED, paged, "0.5.13", None, "0.5.17"),
        *declare_paged(paged, "0.5.13", None),
        Patch(
            paged,
            PAGED,
            "_release_page_ids",
            release_page_ids,
            parameters=("self", "page_ids"),
            since="0.5.17",
            why="learns which slots are free",
            reads=fields_of(paged, PAGED, "page_size"),
        ),
    ]


def _declare_windows(session: Session) -> list[Patch]:
    """The sliding-window part of a slot, which is freed apart from it. The rest happens in the allocator within."""

    def free_swa(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots = args[0] if args else kwargs["free_index"]
        session.note_ownership(_full_allocator(instance), lambda ledger: ledger.note_trim(slots))
        return wrapped(*args, **kwargs)

    def set_mapping(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots = args[0] if args else kwargs["full_indices"]
        session.note_ownership(_full_allocator(instance), lambda ledger: ledger.note_untrim(slots))
        return wrapped(*args, **kwargs)

    reads = fields_of(SWA, SWA_ALLOCATOR, "full_attn_allocator")
    return [
        Patch(
            SWA,
            SWA_ALLOCATOR,
            "free_swa",
            free_swa,
            parameters=("self", "free_index"),
            since="0.5.14",
            until=UNTIL_UNIFIED,
            why="learns which slots have left the sliding window",
            reads=reads,
        ),
        Patch(
            SWA,
            SWA_ALLOCATOR,
            "set_full_to_swa_mapping",
            set_mapping,
            parameters=("self", "full_indices"),
            since="0.5.14",
            until=UNTIL_UNIFIED,
            why="and which have come back",
            reads=reads,
        ),
    ]


def _declare_rows(session: Session) -> list[Patch]:
    def free_row(row_of: Callable[[Any], int], since: str, until: str | None) -> Patch:
        def free(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            row = row_of(args[0] if args else kwargs["req"])
            session.note_ownership(instance.req_to_token, lambda ledger: ledger.note_row_free(row))
            return wrapped(*args, **kwargs)

        return Patch(
            ROWS,
            "ReqToTokenPool",
            "free",
            free,
            parameters=("self", "req"),
            since=since,
            until=until,
            why="learns that a request has left its row",
            reads=fields_of(ROWS, "ReqToTokenPool", "req_to_token"),
        )

    return [
        free_row(attrgetter("req_pool_idx"), "0.5.11", "0.5.19"),
        free_row(attrgetter("kv.req_pool_idx"), "0.5.19", None),
    ]


def _declare_trees(session: Session) -> list[Patch]:
    def adopt(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = wrapped(*args, **kwargs)
        if type(instance).__name__ in KNOWN_TREES:  # what a subclass does besides is not known
            slots = _full_allocator(instance.token_to_kv_pool_allocator)
            session.note_ownership(slots, lambda ledger: ledger.adopt_tree())
        return result

    def insert(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        params = args[0] if args else kwargs["params"]
        result = wrapped(*args, **kwargs)
        if type(instance).__name__ in KNOWN_TREES and not instance.disable and params.value is not None:
            count = len(params.key) // instance.page_size * instance.page_size
            slots = params.value[result.prefix_len : count]
            session.note_ownership(instance.token_to_kv_pool_allocator, lambda ledger: ledger.note_insert(slots))
        return result

    def for_request(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        row = (args[0] if args else kwargs["req"]).req_pool_idx
        return _acting(session, instance, lambda ledger: ledger.act_for_row(row), lambda: wrapped(*args, **kwargs))

    def for_tree(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _acting(session, instance, lambda ledger: ledger.act_for_tree(), lambda: wrapped(*args, **kwargs))

    def declare(
        module: str, owner: str, name: str, wrapper: Wrapper, second: str, why: str, since: str = "0.5.11"
    ) -> Patch:
        return Patch(module, owner, name, wrapper, ("self", second), why, since, UNTIL_UNIFIED)

    whose = "learns for whom slots are freed and inserted"
    return [
        declare(RADIX, "RadixCache", "__init__", adopt, "params", "every slot of this tree is followed"),
        declare(RADIX, "RadixCache", "insert", insert, "params", "learns which slots the tree takes"),
        declare(RADIX, "RadixCache", "evict", for_tree, "params", "the tree frees what it holds"),
        declare(RADIX, "RadixCache", "release_radix_session", for_tree, "session_id", "and here as well", "0.5.15"),
        declare(RADIX, "RadixCache", "cache_finished_req", for_request, "req", whose),
        declare(RADIX, "RadixCache", "cache_unfinished_req", for_request, "req", whose),
        declare(CHUNK, "ChunkCache", "__init__", adopt, "params", "there is no tree"),
        declare(CHUNK, "ChunkCache", "cache_finished_req", for_request, "req", "learns for whom slots are freed"),
    ]


def _full_allocator(allocator: Any) -> Any:
    """The allocator of the slots that rows name: of a pool with a sliding window, the full one within."""
    return getattr(allocator, "full_attn_allocator", allocator)


def _acting(session: Session, tree: Any, start: Callable[[Ledger], None], call: Callable[[], Any]) -> Any:
    allocator = _full_allocator(tree.token_to_kv_pool_allocator)
    session.note_ownership(allocator, start)
    try:
        return call()
    finally:
        session.note_ownership(allocator, lambda ledger: ledger.stop_acting())
