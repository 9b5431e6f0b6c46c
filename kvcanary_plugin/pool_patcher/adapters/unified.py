"""Unified memory: pools of several kinds share one buffer, and slots are virtual.

Which page a slot has is in a table that the allocator changes on the scheduler's stream. Nothing orders this behind the
forward that is running: a page is taken from a slot that was freed, goes to another slot, is cleared, or becomes the
target of a page that moves, while the checks of that forward still take it for the first slot's. The release of a slot
takes effect before the next forward, so what they would fold is bytes of somebody else, and report damage where there
is none. What is more, since SGLang 0.5.19 a forward is told physical slots to store in, but virtual ones to read.
"""

from __future__ import annotations

from typing import Any

from ...errors import UncoveredError

WHY = (
    "slots are virtual, and their pages are given to other slots and moved while the forward still runs whose checks "
    "would fold them; start without --enable-unified-memory"
)


def refuse_unified(pool: Any) -> None:
    """Every kind of pool over a shared buffer.

    Raises:
        UncoveredError: it is one.
    """
    parts = (pool, getattr(pool, "full_kv_pool", None), getattr(pool, "swa_kv_pool", None))
    if any(hasattr(part, "_unified_buffer") or hasattr(part, "unified_buffer") for part in parts):
        raise UncoveredError(f"KV pool {type(pool).__name__} is not covered: {WHY}")
