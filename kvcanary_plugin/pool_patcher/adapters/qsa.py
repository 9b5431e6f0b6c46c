"""QSA, the sparse attention of Qwen: a hybrid pool, and an index with one key for each group of positions.

A key is made from the group's raw keys by the forward that stores its last position, and lies at the slot of any of
them divided by their number: pages consist of whole groups. Until then the raw keys wait in a ring of their request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..sources import view_slots
from .draft import Part, PoolDraft, SlotDraft, StateDraft
from .hybrid import draft_hybrid_pool, list_attention_layers


def draft_qsa_pool(pool: Any, allocator: Any, request_pool: Any) -> PoolDraft:
    """What :func:`draft_hybrid_pool` finds, with the index as a companion and the rings as one more state.

    Args:
        pool: SGLang's pool with ``qsa_compress_ratio`` and buffers of the index for each attention layer.
        allocator, request_pool: see :func:`draft_hybrid_pool`.

    Raises:
        UncoveredError: the attention pool is not covered, or state slots are not where their number says.
    """
    hybrid = draft_hybrid_pool(pool, allocator, request_pool)
    layers, ratio = list_attention_layers(pool), int(pool.qsa_compress_ratio)
    keys = tuple(
        Part(layer, "index", rows)
        for layer, buffer in zip(layers, pool.qsa_compressed_k_buffer_pool, strict=True)
        for rows in view_slots(buffer)
    )
    if not keys:  # a pipeline stage without attention layers
        return hybrid
    groups = SlotDraft("groups", keys, int(pool.qsa_compressed_capacity), hybrid.main.page_size // ratio, ratio=ratio)
    count = int(pool.qsa_num_request_slots)
    row_slots = torch.arange(count, dtype=torch.int32, device=keys[0].rows.device)
    ring = StateDraft("ring", tuple(_read_ring(pool, layers)), count, row_slots, split=ratio)
    return replace(hybrid, name="QSA", companions=(groups,), states=(*hybrid.states, ring))


def _read_ring(pool: Any, layers: list[int]) -> Iterator[Part]:
    """Raw keys of each layer. Their coordinates, which all layers share, count as the first one's."""
    for layer, buffer in zip(layers, pool.qsa_key_state_buffer_pool, strict=True):
        yield from (Part(layer, "raw key", rows) for rows in view_slots(buffer))
    yield from (Part(layers[0], "coordinates", rows) for rows in view_slots(pool.qsa_rope_position_buffer))
