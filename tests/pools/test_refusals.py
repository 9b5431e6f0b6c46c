"""What is refused, and in which words."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import memory_pool as mp
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

from kvcanary_plugin.errors import UncoveredError
from kvcanary_plugin.pool_patcher.adapters import adapt_model_runner, draft_pool, list_gaps

from .composite import deepseek_v4, swa_pool
from .interleaved import mxfp8, native_nvfp4
from .single import flat, mha, need


def make_mha(kind: type, **options: Any) -> Any:
    return kind(8, 1, torch.bfloat16, 2, 4, 2, "cpu", False, **options)


@pytest.mark.parametrize(
    ("name", "make", "path"),
    [
        ("one tensor", lambda: torch.zeros(9, 2), "extra"),
        ("a list", lambda: [torch.zeros(9, 2), torch.zeros(9, 2)], r"extra\[0\]"),
        ("a dict", lambda: {"a": torch.zeros(9, 2)}, r"extra\['a'\]"),
        ("one byte a slot", lambda: torch.zeros(9, dtype=torch.uint8), "extra"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_subclass_with_a_buffer_of_its_own_is_refused_by_its_name(name: str, make: Any, path: str):
    class Extended(mp.MHATokenToKVPool):
        def _create_buffers(self) -> None:
            super()._create_buffers()
            self.extra = make()

    built = flat(make_mha(Extended))
    with pytest.raises(UncoveredError, match=rf"KV pool Extended has buffer {path} of shape .* that is not covered"):
        draft_pool(built.pool, built.allocator)


def test_window_pools_are_refused_where_the_window_is_not_known():
    built = swa_pool(1, [1], [0])

    assert "does not say how long its window is" in list_gaps(built.pool, built.allocator)[0]


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("translate_loc_to_hisparse_device", lambda loc: loc, "wherever its table of device slots says"),
        ("shard_spec", object(), "each rank keeps every n-th page"),
        ("layer_shard_enabled", True, "each rank keeps some of the layers"),
        ("post_capture_active", True, "no memory behind its slots yet"),
        ("kv_cache_layout", "blocked_5d", "not covered in this layout"),
    ],
)
def test_pools_whose_slots_are_elsewhere_are_refused(attribute: str, value: object, message: str):
    built = mha(4)
    setattr(built.pool, attribute, value)
    if attribute == "kv_cache_layout":
        built.pool.k_buffer = [buffer.view(3, 2, 2, 4, 2) for buffer in built.pool.k_buffer]

    with pytest.raises(UncoveredError, match=rf"KV pool MHATokenToKVPool .*{message}"):
        draft_pool(built.pool, built.allocator)


def test_an_allocator_with_more_slots_than_the_pool_is_refused():
    pool = make_mha(mp.MHATokenToKVPool)
    allocator = TokenToKVPoolAllocator(64, torch.bfloat16, "cpu", pool, False)

    (gap,) = list_gaps(pool, allocator)

    assert "KV pool MHATokenToKVPool has 9 slots in space 'full', but its allocator hands out 65" in gap


def test_an_allocator_is_known_by_what_frees_its_slots():
    class Named(PagedTokenToKVPoolAllocator):
        pass

    class Odd(PagedTokenToKVPoolAllocator):
        def free(self, free_index: torch.Tensor) -> None:
            super().free(free_index)

    pool = mha(4).pool

    assert list_gaps(pool, Named(8, 4, torch.bfloat16, "cpu", pool, False)) == []
    assert "allocator Odd is not covered" in list_gaps(pool, Odd(8, 4, torch.bfloat16, "cpu", pool, False))[0]


def test_an_object_that_is_no_pool_is_refused():
    assert "KV pool object is not covered: it has none of the buffers" in list_gaps(object(), mha(1).allocator)[0]


def test_pages_that_end_within_a_group_are_refused():
    built = deepseek_v4()
    built.pool.page_size = 96

    (gap,) = list_gaps(built.pool, built.allocator)

    assert "pages of 96 positions, which do not consist of whole groups of 128" in gap


def test_scales_that_are_interleaved_in_another_way_are_refused():
    built = mxfp8()
    assert list_gaps(built.pool, built.allocator) == []
    built.pool.v_scale_buffer = [buffer.reshape(2, 2, 4, 8, 16) for buffer in built.pool.v_scale_buffer]

    assert "buffer v_scale_buffer of shape (2, 2, 4, 8, 16)" in list_gaps(built.pool, built.allocator)[0]


def test_native_scales_that_do_not_fit_the_page_are_refused():
    built = native_nvfp4()
    assert list_gaps(built.pool, built.allocator) == []
    built.pool.native_v_scale_buffer = [buffer.reshape(4, 2, 4, 8) for buffer in built.pool.native_v_scale_buffer]

    assert "buffer native_v_scale_buffer of shape (4, 2, 4, 8)" in list_gaps(built.pool, built.allocator)[0]


def test_five_dimensions_are_groups_only_where_the_pool_says_so():
    built = mxfp8()
    built.pool.mxfp8_sf_interleaved = False

    assert "buffer k_scale_buffer of shape (2, 2, 32, 4, 4)" in list_gaps(built.pool, built.allocator)[0]


def test_hisparse_is_refused():
    module = pytest.importorskip("sglang.srt.mem_cache.hisparse_memory_pool")
    need("DSATokenToKVPool")
    pool = module.HiSparseDSATokenToKVPool(64, 64, 16, torch.bfloat16, 8, 1, "cpu", 128, False, 24)

    assert "wherever its table of device slots says" in list_gaps(pool, flat(pool).allocator)[0]


def test_a_pool_the_guard_does_not_follow_yet_is_refused_at_start(monkeypatch: pytest.MonkeyPatch):
    built = swa_pool(1, [1], [0])
    runner = SimpleNamespace(
        model=torch.nn.Identity(),
        token_to_kv_pool=built.pool,
        token_to_kv_pool_allocator=built.allocator,
        req_to_token_pool=built.rows,
        sliding_window_size=4,
        model_config=SimpleNamespace(model_path="test"),
    )
    monkeypatch.setattr("kvcanary_plugin.pool_patcher.adapters.FOLLOWED", frozenset())
    with pytest.raises(UncoveredError, match=re.escape("SWAKVPool is known but not followed yet: space 'window' has")):
        adapt_model_runner(runner, "all")
    monkeypatch.setattr("kvcanary_plugin.pool_patcher.adapters.FOLLOWED", frozenset({"mapping"}))

    assert adapt_model_runner(runner, "all").companions[0].name == "window"
