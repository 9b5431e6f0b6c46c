"""Slot allocators: freed slots hold no live token any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcanary_plugin.pool_patcher.patch import Patch

if TYPE_CHECKING:
    from kvcanary_plugin.runtime.session import Session

CLASSES = (
    ("sglang.srt.mem_cache.allocator.token", "TokenToKVPoolAllocator"),
    ("sglang.srt.mem_cache.allocator.paged", "PagedTokenToKVPoolAllocator"),
)


def declare_patches(session: Session) -> list[Patch]:
    """``free`` and ``clear`` of every covered allocator."""

    # Within a free group SGLang only queues the slots and calls free again at its end: marking them twice is harmless.
    def free(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session.release(instance, args[0] if args else kwargs["free_index"])
        return wrapped(*args, **kwargs)

    def clear(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session.release(instance, None)
        return wrapped(*args, **kwargs)

    patches = []
    for module, owner in CLASSES:
        patches.append(
            Patch(
                module, owner, "free", free, ("self", "free_index"), since="0.5.13", why="marks freed slots as not live"
            )
        )
        patches.append(
            Patch(module, owner, "clear", clear, ("self",), since="0.5.13", why="marks all slots after a flush")
        )
    return patches
