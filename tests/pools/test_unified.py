"""Unified memory: every kind of it is refused, and the reason that is given is how SGLang's allocators work."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary_plugin.pool_patcher.adapters import list_gaps

unified = pytest.importorskip("sglang.srt.mem_cache.unified_memory_pool")
PAGE = 4


def make(function: Callable[..., Any], **options: Any) -> Any:
    """With those of the options that this release has, and nothing for others without a default."""
    names = inspect.signature(function).parameters
    missing = {name: None for name, known in names.items() if known.default is known.empty}
    return function(**missing | {name: value for name, value in options.items() if name in names})


def window_pools() -> Any:
    return make(
        unified.init_unified_swa_pools,
        device="cpu",
        kv_cache_dtype=torch.bfloat16,
        head_num=2,
        head_dim=4,
        v_head_dim=4,
        swa_head_num=2,
        swa_head_dim=4,
        swa_v_head_dim=4,
        page_size=PAGE,
        start_layer=0,
        end_layer=2,
        swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1],
        full_max_total_num_tokens=64,
        swa_max_total_num_tokens=64,
        enable_memory_saver=False,
        need_sort=False,
    )


def hybrid_pools(**options: Any) -> Any:
    shape = SimpleNamespace(conv=[(8, 4)], temporal=(2, 4, 4))
    options = {"use_mla_backend": False, "head_num": 2, "head_dim": 4, "v_head_dim": 4} | options
    return make(
        unified.init_unified_mamba_pools,
        device="cpu",
        kv_cache_dtype=torch.bfloat16,
        page_size=PAGE,
        start_layer=0,
        end_layer=2,
        is_draft_worker=False,
        mamba_layer_ids=[0],
        full_attention_layer_ids=[1],
        mamba2_cache_params=SimpleNamespace(
            shape=shape,
            dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32),
            layers=[0],
            is_kda=False,
        ),
        model_context_len=64,
        extra_max_context_len=4,
        max_total_num_tokens=64,
        max_mamba_cache_size=8,
        max_num_reqs=4,
        enable_memory_saver=False,
        enable_mamba_extra_buffer=False,
        enable_mamba_extra_buffer_lazy=False,
        disable_overlap_schedule=True,
        need_sort=False,
        **options,
    )


def latent_pools() -> Any:
    if not hasattr(unified, "UnifiedMLATokenToKVPool"):
        pytest.skip("this SGLang has no UnifiedMLATokenToKVPool")
    return hybrid_pools(use_mla_backend=True, kv_lora_rank=16, qk_rope_head_dim=8)


@pytest.mark.parametrize("build", [window_pools, hybrid_pools, latent_pools])
def test_unified_memory_is_refused_and_which_flag_to_leave_out_is_said(build: Callable[[], Any]):
    bundle = build()
    pool = bundle.token_to_kv_pool
    for part in (pool, pool.full_kv_pool, *filter(None, [getattr(pool, "swa_kv_pool", None)])):
        gap = list_gaps(part, bundle.token_to_kv_pool_allocator, window=4)[0]

        assert gap.startswith(f"KV pool {type(part).__name__} is not covered: slots are virtual")
        assert gap.endswith("start without --enable-unified-memory")


def test_the_page_of_a_freed_slot_goes_to_another_slot_at_once():
    """No forward is waited for: this is why a check beside one cannot say whose bytes it folds."""
    allocator = window_pools().token_to_kv_pool_allocator.full_attn_allocator
    first, second = allocator.free_virtual_ids[:2].clone()
    allocator.bind(first.view(1), allocator.take_physical(PAGE))
    page = int(allocator.virtual_to_physical[first])
    allocator.free(first.view(1) * PAGE)
    unbound = int(allocator.virtual_to_physical[first])
    allocator.bind(second.view(1), allocator.take_physical(PAGE))

    assert unbound == -1
    assert int(allocator.virtual_to_physical[second]) == page
