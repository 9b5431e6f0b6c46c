"""MiniMax's sparse attention: sub-pools for attention and for the index that chooses, all with the same slots."""

from __future__ import annotations

from typing import Any

from ...errors import UncoveredError
from .draft import PoolDraft, SlotDraft
from .rows import read_rows

_INDEX_POOLS = (("index_kv_pool", "index_kv_layer_id_mapping"), ("index_k_pool", "index_k_layer_id_mapping"))


def draft_sparse_pool(pool: Any, allocator: Any) -> PoolDraft:
    """One space: a slot's row in the main pool and its rows in the index pools.

    Args:
        pool: SGLang's pool with ``main_pool`` and up to two index pools.
        allocator: SGLang's allocator of the slots.

    Raises:
        UncoveredError: a sub-pool is not covered, or has fewer slots than the main one.
    """
    main = read_rows(pool.main_pool)
    parts = list(main.parts)
    for attribute, mapping in _INDEX_POOLS:
        index_pool = getattr(pool, attribute, None)
        if index_pool is None:
            continue
        layers = [layer for layer, _ in sorted(getattr(pool, mapping).items(), key=lambda item: item[1])]
        index = read_rows(index_pool, layers, prefix="index ")
        if index.slot_count < main.slot_count:
            raise UncoveredError(
                f"KV pool {type(pool).__name__} has {index.slot_count} slots in {attribute}, {main.slot_count} in "
                "main_pool"
            )
        parts += index.parts
    return PoolDraft("sparse", SlotDraft("full", tuple(parts), main.slot_count, main.page_size, allocator=allocator))
