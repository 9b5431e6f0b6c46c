"""What mode ``quarantine`` does to SGLang's slots: damaged ones leave circulation, and the pool is that much smaller.

Wrapped in that mode only, ahead of ``allocators``, which must see freed slots before any are held back here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kvcanary_plugin.pool_patcher.patch import Patch, fields_of

from .allocators import ONE_FILE, PAGED, TOKEN

if TYPE_CHECKING:
    from kvcanary_plugin.runtime.session import Session

TREES = "sglang.srt.mem_cache.base_prefix_cache"
CHECKED_POOL = "full"
WHY_FREE = "keeps damaged slots out of circulation"
EXTEND = ("prefix_lens", "prefix_lens_cpu", "seq_lens", "seq_lens_cpu", "last_loc", "extend_num_tokens")
COUNTED = ("pool_name", "available", "evictable", "protected", "session_held", "total", "uncached")


def take_free(allocator: Any, filtered: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Pass the free pages of a token or paged allocator through ``filtered``; of page size 1, they are slots."""
    for name in ("free_pages", "release_pages"):
        pages = getattr(allocator, name, None)
        if pages is not None and len(pages):
            setattr(allocator, name, filtered(pages))
    if getattr(allocator, "staged_pages", None):
        allocator.staged_pages = [filtered(pages) for pages in allocator.staged_pages]
        allocator.num_staged_pages = sum(len(pages) for pages in allocator.staged_pages)


def count_free(allocator: Any) -> int | None:
    """Slots on the free list of a token or paged allocator, None for another kind."""
    if type(allocator).__name__ not in (TOKEN, PAGED):
        return None
    lists = [allocator.free_pages, getattr(allocator, "release_pages", None), *getattr(allocator, "staged_pages", ())]
    return sum(len(pages) for pages in lists if pages is not None) * int(allocator.page_size)


def evict(prefix_cache: Any, slots: int) -> None:
    """Evict prefixes that no request holds."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    prefix_cache.evict(EvictParams(num_tokens=slots))


def declare_patches(session: Session) -> list[Patch]:
    """What hands out slots, what takes them back, what counts them."""

    def free(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots = args[0] if args else kwargs["free_index"]
        return wrapped(session.policy.keep_back(instance, slots) if session.policy is not None else slots)

    def release_page_ids(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if session.policy is not None:
            args = tuple(session.policy.keep_back(instance, page_ids, are_pages=True) for page_ids in args)
        return wrapped(*args, **kwargs)

    def clear(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if session.policy is not None:
            session.policy.lift(instance)
        return wrapped(*args, **kwargs)

    def check_pool_invariant(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(COUNTED, args, strict=False)) | kwargs
        if session.policy is not None and given["pool_name"] == CHECKED_POOL:
            given["total"] -= len(session.policy.withheld)  # the pool is that much smaller until a flush
        return wrapped(**given)

    def available_size(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        size = wrapped(*args, **kwargs)
        return size if session.policy is None else session.policy.less_pending(instance, size)

    def make_room(allocator: Any, slots: int) -> None:
        if session.policy is not None:
            session.policy.make_room(allocator, slots)

    def alloc(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        make_room(instance, args[0] if args else kwargs["need_size"])
        return wrapped(*args, **kwargs)

    def alloc_extend(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(EXTEND, args, strict=False)) | kwargs
        make_room(instance, given["extend_num_tokens"] + len(given["seq_lens_cpu"]) * instance.page_size)
        return wrapped(*args, **kwargs)

    def alloc_decode(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seq_lens = args[0] if args else kwargs["seq_lens"]
        make_room(instance, len(seq_lens) * instance.page_size)
        return wrapped(*args, **kwargs)

    def declare(owner: str, module: str, since: str, until: str | None, free_until: str | None) -> list[Patch]:
        why_room = "evicts more where withheld slots did not come free"
        lists = fields_of(module, owner, "free_pages", "release_pages", "page_size")
        patches = [
            Patch(module, owner, "free", free, ("self", "free_index"), WHY_FREE, since, free_until, reads=lists),
            Patch(module, owner, "clear", clear, ("self",), "lets them circulate again after a flush", since, until),
            Patch(module, owner, "available_size", available_size, ("self",), "does not count on them", since, until),
            Patch(module, owner, "alloc", alloc, ("self", "need_size"), why_room, since, until),
        ]
        if owner == PAGED:
            patches += [
                Patch(module, owner, "alloc_extend", alloc_extend, ("self", *EXTEND), why_room, since, until),
                Patch(module, owner, "alloc_decode", alloc_decode, ("self", "seq_lens"), why_room, since, until),
            ]
        return patches

    def declare_release(since: str, until: str | None, *lists: str) -> Patch:
        return Patch(
            paged,
            PAGED,
            "_release_page_ids",
            release_page_ids,
            parameters=("self", "page_ids"),
            since=since,
            until=until,
            why=WHY_FREE,
            reads=fields_of(paged, PAGED, "free_pages", *lists),
        )

    def declare_check(module: str, owner: str, since: str, until: str | None) -> Patch:
        return Patch(
            module,
            owner,
            "_check_pool_invariant",
            check_pool_invariant,
            parameters=COUNTED,
            kind="staticmethod",
            since=since,
            until=until,
            why="takes withheld slots off the size that SGLang's leak check expects",
            reads=fields_of(TREES, "EvictParams", "num_tokens"),
        )

    token, paged = f"{ONE_FILE}.token", f"{ONE_FILE}.paged"
    checks = "sglang.srt.managers.scheduler_runtime_checker_mixin", "sglang.srt.managers.scheduler_components"
    return [
        *declare(TOKEN, ONE_FILE, "0.5.11", "0.5.13", "0.5.13"),
        *declare(PAGED, ONE_FILE, "0.5.11", "0.5.13", "0.5.13"),
        *declare(TOKEN, token, "0.5.13", None, None),
        *declare(PAGED, paged, "0.5.13", None, "0.5.17"),
        declare_release("0.5.17", "0.5.20", "release_pages"),
        declare_release("0.5.20", None, "staged_pages", "num_staged_pages"),
        declare_check(checks[0], "SchedulerRuntimeCheckerMixin", "0.5.11", "0.5.13"),
        declare_check(f"{checks[1]}.invariant_checker", "SchedulerInvariantChecker", "0.5.13", None),
    ]
