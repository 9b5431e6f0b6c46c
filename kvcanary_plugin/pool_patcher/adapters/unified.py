"""Unified memory: pools of several kinds share one buffer, slots are virtual, and pages move when others are freed."""

from __future__ import annotations

from typing import Any

from .draft import PoolDraft, SlotDraft

MOVING = (
    "its pages move within a buffer that several pools share, so that the bytes of a slot have no place of their own; "
    "what holds is the chain of tokens, checked alone with --kvcanary-content none"
)


def is_unified(pool: Any) -> bool:
    """Whether slots of ``pool`` are virtual."""
    parts = (pool, getattr(pool, "full_kv_pool", None), getattr(pool, "swa_kv_pool", None))
    return any(hasattr(part, "_unified_buffer") or hasattr(part, "unified_buffer") for part in parts)


def draft_unified_pool(pool: Any, allocator: Any) -> PoolDraft:
    """One space without bytes: the virtual slots, which keep their numbers however pages move."""
    inner = allocator.full_attn_allocator
    page_size = int(inner.page_size)
    slot_count = (int(inner.virtual_to_physical.shape[0]) - 1) * page_size
    return PoolDraft("unified", SlotDraft("virtual", (), slot_count, page_size, allocator=inner))
