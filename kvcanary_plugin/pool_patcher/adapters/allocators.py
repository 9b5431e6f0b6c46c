"""Which of SGLang's allocators hands out the slots of each space, and whether what it does can be followed."""

from __future__ import annotations

from typing import Any

# Those whose free and clear are wrapped. One that inherits both is followed too; one over several pools is followed
# through the allocators it consists of.
COVERED_ALLOCATORS = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")


def parts_of(allocator: Any) -> tuple[Any, ...]:
    """The allocators that keep slots: ``allocator`` itself, or those it consists of."""
    inner = [getattr(allocator, name, None) for name in ("full_attn_allocator", "swa_attn_allocator")]
    known = tuple(dict.fromkeys(part for part in inner if part is not None))
    return known or (allocator,)


def list_allocator_gaps(allocator: Any) -> list[str]:
    """Why frees of this allocator would go unseen; empty if they do not."""
    gaps = []
    for part in parts_of(allocator):
        owners = {_owner(type(part), name) for name in ("free", "clear")}
        if not owners <= set(COVERED_ALLOCATORS):
            gaps.append(f"allocator {type(part).__name__} is not covered (covered: {', '.join(COVERED_ALLOCATORS)})")
    return gaps


def count_slots(allocator: Any, page_size: int) -> int:
    """Slots that ``allocator`` may hand out, its padding page included."""
    return int(allocator.size) + page_size


def _owner(kind: type, name: str) -> str:
    return next((base.__name__ for base in kind.__mro__ if name in vars(base)), "")
