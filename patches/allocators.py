"""Slot allocators: freed slots hold no live token any more.

What is wrapped is where every way to free a slot ends. Until 0.5.17 that is ``free``. Since then the paged allocator
has further ways, which never pass ``free`` and all end in ``_release_page_ids``; the other allocator still ends in
``free``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvcanary_plugin.pool_patcher.patch import Patch, fields_of

if TYPE_CHECKING:
    from kvcanary_plugin.runtime.session import Session

TOKEN, PAGED = "TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator"
ONE_FILE = "sglang.srt.mem_cache.allocator"
WHY_FREE = "marks freed slots as not live"
WHY_CLEAR = "marks all slots after a flush"


def slots_of_pages(page_ids: torch.Tensor, page_size: int) -> torch.Tensor:
    """Every slot of some pages: int64 (n,) to int64 (n * page_size,)."""
    return (page_ids.unsqueeze(1) * page_size + torch.arange(page_size, device=page_ids.device)).flatten()


def declare_patches(session: Session) -> list[Patch]:
    """The end of every way to free slots, and ``clear``, of the token and the paged allocator."""

    # Within a free group SGLang only queues the slots and calls free again at its end: marking them twice is harmless.
    def free(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session.release(instance, args[0] if args else kwargs["free_index"])
        return wrapped(*args, **kwargs)

    def release_page_ids(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for page_ids in args:
            session.release(instance, slots_of_pages(page_ids, instance.page_size))
        return wrapped(*args, **kwargs)

    def clear(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session.release(instance, None)
        return wrapped(*args, **kwargs)

    def declare(owner: str, module: str, since: str, until: str | None, free_until: str | None) -> list[Patch]:
        return [
            Patch(module, owner, "free", free, ("self", "free_index"), WHY_FREE, since, free_until),
            Patch(module, owner, "clear", clear, ("self",), WHY_CLEAR, since, until),
        ]

    token, paged = f"{ONE_FILE}.token", f"{ONE_FILE}.paged"
    return [
        *declare(TOKEN, ONE_FILE, "0.5.11", "0.5.13", "0.5.13"),
        *declare(PAGED, ONE_FILE, "0.5.11", "0.5.13", "0.5.13"),
        *declare(TOKEN, token, "0.5.13", None, None),
        *declare(PAGED, paged, "0.5.13", None, "0.5.17"),
        Patch(
            paged,
            PAGED,
            "_release_page_ids",
            release_page_ids,
            parameters=("self", "page_ids"),
            since="0.5.17",
            why=WHY_FREE,
            reads=fields_of(paged, PAGED, "page_size"),
        ),
    ]
