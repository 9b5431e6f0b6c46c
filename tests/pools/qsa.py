"""SGLang's pool with a compressed index, small and on a CPU, and how it stores one slot, one group and one ring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from .composite import hybrid_pool, hybrid_writes
from .single import Built, Write, full

PAGE, RATIO = 8, 4
ATTENTION = (1, 3)


def qsa_pool(size: int = 16, requests: int = 4, **options: Any) -> Built:
    """Attention in layers 1 and 3, a linear layer in 0 and 2; pages of 8, groups of 4."""
    module = pytest.importorskip("sglang.srt.mem_cache.qsa_kv_pool")
    rows = hybrid_pool(requests=requests).rows
    pool = module.QSATokenToKVPool(
        size=size,
        dtype=torch.bfloat16,
        page_size=PAGE,
        head_num=2,
        head_dim=4,
        full_attention_layer_ids=list(ATTENTION),
        device="cpu",
        mamba_pool=rows.mamba_pool,
        qsa_index_kv_heads=1,
        qsa_index_head_dim=8,
        qsa_compress_ratio=RATIO,
        qsa_token_topk=8,
        num_request_slots=rows.req_to_token.shape[0],
        **options,
    )
    return Built(pool, PagedTokenToKVPoolAllocator(size, PAGE, torch.bfloat16, "cpu", pool, False), rows)


def qsa_writes(built: Built) -> Iterator[Write]:
    pool = built.pool
    yield from hybrid_writes(built)
    key = full(1, 1, 8)
    for layer in ATTENTION:
        for slot in range((pool.size + PAGE) // RATIO):
            yield Write(
                "groups", slot, layer, frozenset({"index"}),
                lambda layer=layer, slot=slot: pool.set_qsa_compressed_k_buffer(layer, torch.tensor([slot]), key),
            )  # fmt: skip
        for place in range(built.rows.req_to_token.shape[0] * RATIO):
            yield Write(
                "ring", place // RATIO, layer, frozenset({"raw key"}),
                lambda layer=layer, place=place: pool.set_qsa_key_state_buffer(layer, torch.tensor([place]), key),
            )  # fmt: skip
    for place in range(built.rows.req_to_token.shape[0] * RATIO):
        yield Write(
            "ring", place // RATIO, ATTENTION[0], frozenset({"coordinates"}),
            lambda place=place: pool.set_qsa_rope_position_buffer(torch.tensor([place]), torch.tensor([-1])),
        )  # fmt: skip
