"""Rows that change their slot, or leave the pool and come back: their records go with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcanary_plugin.pool_patcher.patch import Patch

if TYPE_CHECKING:
    from kvcanary_plugin.runtime.session import Session

POOLS = "sglang.srt.mem_cache.memory_pool"
WINDOW_POOLS = "sglang.srt.mem_cache.swa_memory_pool"
ONE_FILE = "sglang.srt.mem_cache.allocator"
MOVING = (
    (POOLS, "MHATokenToKVPool", "0.5.11"),
    (POOLS, "MLATokenToKVPool", "0.5.13"),
    (POOLS, "HybridLinearKVPool", "0.5.11"),
    (WINDOW_POOLS, "SWAKVPool", "0.5.11"),
)
ALLOCATORS = (
    (ONE_FILE, "TokenToKVPoolAllocator", "0.5.11", "0.5.13"),
    (ONE_FILE, "PagedTokenToKVPoolAllocator", "0.5.11", "0.5.13"),
    (f"{ONE_FILE}.token", "TokenToKVPoolAllocator", "0.5.13", None),
    (f"{ONE_FILE}.paged", "PagedTokenToKVPoolAllocator", "0.5.13", None),
    (WINDOW_POOLS, "SWATokenToKVPoolAllocator", "0.5.11", "0.5.13"),
    (f"{ONE_FILE}.swa", "SWATokenToKVPoolAllocator", "0.5.13", None),
)
WHY_MOVE = "moves the records with the rows"
WHY_COPY = "keeps the records of rows that leave the pool, and compares the rows when they come back"


def main_allocator(allocator: Any) -> Any:
    """The allocator of the main slots."""
    return getattr(allocator, "full_attn_allocator", allocator)


def declare_patches(session: Session) -> list[Patch]:
    """Copies within a pool, out of it, and back into it."""

    def move_kv_cache(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = wrapped(*args, **kwargs)
        target, source = (*args, *kwargs.values())[:2]
        session.move(instance, target, source)
        return result

    def get_cpu_copy(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        copy = wrapped(*args, **kwargs)
        session.note_copied(main_allocator(instance), args[0] if args else kwargs["indices"], copy)
        return copy

    def load_cpu_copy(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = wrapped(*args, **kwargs)
        copy, slots = (*args, *kwargs.values())[:2]
        session.note_loaded(main_allocator(instance), slots, copy)
        return result

    patches = [
        Patch(
            module,
            owner,
            "move_kv_cache",
            move_kv_cache,
            parameters=("self", "tgt_loc", "src_loc"),
            since=since,
            why=WHY_MOVE,
        )
        for module, owner, since in MOVING
    ]
    for module, owner, since, until in ALLOCATORS:
        copies, loads = ("self", "indices"), ("self", "kv_cache_cpu", "indices")
        patches.append(Patch(module, owner, "get_cpu_copy", get_cpu_copy, copies, WHY_COPY, since, until))
        patches.append(Patch(module, owner, "load_cpu_copy", load_cpu_copy, loads, WHY_COPY, since, until))
    return patches
