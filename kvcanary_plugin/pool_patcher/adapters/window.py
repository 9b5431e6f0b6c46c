"""Pools of models with sliding-window layers: one sub-pool keeps all slots, the other those within the window."""

from __future__ import annotations

from typing import Any

from ...errors import UncoveredError
from .draft import PoolDraft, SlotDraft
from .rows import read_rows


def draft_window_pool(pool: Any, allocator: Any, window: int | None) -> PoolDraft:
    """Main space: the full sub-pool. Companion: the window's, reached through the live index mapping.

    A model with window layers only has no full sub-pool worth the name: its main space is the window's.

    Args:
        pool: SGLang's pool with ``full_kv_pool``, ``swa_kv_pool`` and ``layers_mapping``.
        allocator: SGLang's allocator over both.
        window: positions before the current one that window layers attend to.

    Raises:
        UncoveredError: a sub-pool is not covered, or it is not known what belongs to the window.
    """
    name = type(pool).__name__
    if window is None or window <= 0:
        raise UncoveredError(f"KV pool {name} is not covered where the model does not say how long its window is")
    if getattr(pool, "swa_req_ring_size", None) is not None:
        raise UncoveredError(f"KV pool {name} is not covered with a ring of window slots for each request")
    full = read_rows(pool.full_kv_pool, _layers(pool, in_window=False))
    held = read_rows(pool.swa_kv_pool, _layers(pool, in_window=True))
    full_allocator, window_allocator = allocator.full_attn_allocator, allocator.swa_attn_allocator
    if full_allocator is window_allocator:
        main = SlotDraft(
            "window", held.parts, held.slot_count, held.page_size, window=window, allocator=window_allocator
        )
        return PoolDraft("window only", main)
    mapping = pool.full_to_swa_index_mapping
    if mapping is None or mapping.shape[0] < full.slot_count:
        raise UncoveredError(f"KV pool {name} has no mapping of its {full.slot_count} full slots to the window's")
    return PoolDraft(
        "full and window",
        SlotDraft("full", full.parts, full.slot_count, full.page_size, allocator=full_allocator),
        (
            SlotDraft(
                "window", held.parts, held.slot_count, held.page_size, mapping, window, allocator=window_allocator
            ),
        ),
    )


def _layers(pool: Any, *, in_window: bool) -> list[int]:
    """The model's layers of one sub-pool, in the order in which it keeps them."""
    chosen = [(index, layer) for layer, (index, is_window) in pool.layers_mapping.items() if is_window == in_window]
    return [layer for _, layer in sorted(chosen)]
