"""What is covered and what is refused, by what a pool is made of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import memory_pool as mp

from kvcanary_plugin.pool_patcher.adapters import adapt_pool, draft_pool, list_gaps
from kvcanary_plugin.pool_patcher.spaces import FOLLOWED, list_needs

from .composite import deepseek_v4, hybrid_pool, pure_swa_pool, swa_pool
from .folding import Folding
from .single import flat, mha, mla


def make_mha(kind: type, **options: Any) -> Any:
    return kind(8, 1, torch.bfloat16, 2, 4, 2, "cpu", False, **options)


def test_a_subclass_with_the_same_buffers_is_covered():
    class Same(mp.MHATokenToKVPool):
        def get_key_buffer(self, layer_id: int) -> torch.Tensor:
            return super().get_key_buffer(layer_id)

    built = flat(make_mha(Same))

    assert list_gaps(built.pool, built.allocator) == []


def test_a_view_of_what_is_read_already_is_no_buffer_of_its_own():
    built = flat(make_mha(mp.MHATokenToKVPool))
    built.pool.shortcut = built.pool.k_buffer[0][:, 0]

    assert list_gaps(built.pool, built.allocator) == []


def test_the_value_half_of_a_latent_is_not_folded_twice():
    built = mla()
    draft = draft_pool(built.pool, built.allocator)

    assert [(part.layer, part.half, part.rows.shape[2]) for part in draft.parts()] == [(0, "KV", 64), (1, "KV", 64)]


def test_layers_are_the_models_own():
    pool = mp.MHATokenToKVPool(8, 1, torch.bfloat16, 2, 4, 2, "cpu", False, start_layer=5, end_layer=7)

    assert {part.layer for part in draft_pool(pool, flat(pool).allocator).parts()} == {5, 6}


def test_a_pool_that_stores_nothing_is_known_as_such():
    built = mha(4, kind="NoOpMHATokenToKVPool")
    guarded = adapt_pool(built.pool, built.allocator, built.rows.req_to_token, "all", model="test")

    assert guarded.name == "nothing stored"
    assert guarded.table.sources == ()
    assert guarded.slot_count == 12


@pytest.mark.parametrize("content", ["none", "partial", "all"])
def test_content_decides_how_much_of_a_slot_is_read(content: str):
    built = hybrid_pool()
    guarded = adapt_pool(
        built.pool, built.allocator, built.rows.req_to_token, content, model="test", request_pool=built.rows
    )
    expected = {"none": set(), "partial": {16}, "all": {16, 36, 128}}[content]

    assert {
        source.read_bytes for table in (guarded.table, guarded.states[0].table) for source in table.sources
    } == expected


def test_window_pools_have_two_spaces_and_the_allocators_of_each():
    built = swa_pool(4, [1], [0, 2])
    guarded = adapt_pool(built.pool, built.allocator, built.rows.req_to_token, "all", model="test", window=4)
    (window,) = guarded.companions

    assert guarded.allocator is guarded.main.allocator is built.allocator.full_attn_allocator
    assert window.allocator is built.allocator.swa_attn_allocator
    assert window.mapping is built.allocator.full_to_swa_index_mapping
    assert (guarded.slot_count, window.slot_count, window.window) == (16, 12, 4)
    assert set(guarded.table.names) == {(1, "K"), (1, "V")}
    assert set(window.table.names) == {(0, "K"), (0, "V"), (2, "K"), (2, "V")}
    assert list(list_needs(guarded)) == ["mapping"]


def test_the_mapping_says_where_a_slot_is_within_the_window():
    built = swa_pool(1, [1], [0])
    draft = draft_pool(built.pool, built.allocator, window=4)
    slots = built.allocator.alloc(6)
    held = draft.companions[0].mapping[slots]
    built.pool.set_kv_buffer(
        SimpleNamespace(layer_id=0), mp.KVWriteLoc(slots, swa_loc=held), torch.ones(6, 2, 4), torch.ones(6, 2, 4)
    )
    stored = draft.companions[0].parts[0].rows[held]
    built.allocator.free_swa(slots[:2])

    assert stored.all()
    assert draft.companions[0].mapping[slots].tolist() == [0, 0, *held.tolist()[2:]]


def test_a_model_of_window_layers_only_has_the_window_as_its_main_space():
    built = pure_swa_pool()
    guarded = adapt_pool(built.pool, built.allocator, built.rows.req_to_token, "all", model="test", window=4)

    assert (guarded.main.name, guarded.main.window, guarded.companions) == ("window", 4, ())
    assert guarded.slot_count == 9
    assert list(list_needs(guarded)) == ["window"]


def test_states_are_found_through_the_request_table():
    built = hybrid_pool()
    guarded = adapt_pool(
        built.pool, built.allocator, built.rows.req_to_token, "all", model="test", request_pool=built.rows
    )
    (state,) = guarded.states

    assert state.row_slots is built.rows.req_index_to_mamba_index_mapping
    assert (state.slot_count, state.split) == (6, 1)
    assert set(state.table.names) == {(0, "conv 0"), (0, "SSM"), (2, "conv 0"), (2, "SSM")}
    assert list(list_needs(guarded)) == ["state"]


def test_large_states_are_split_so_that_their_keys_stay_small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvcanary_plugin.pool_patcher.adapters.hybrid._WHOLE_BYTES", 64)
    built = hybrid_pool()
    folding = Folding(built)
    whole, split = folding.draft.states

    assert (whole.name, whole.split, split.name, split.split) == ("state", 1, "state in 2 parts", 2)
    before = folding.fold()
    built.rows.mamba_pool.mamba_cache.temporal[1, 3, 1, 2, 2] = 1.0
    assert list(folding.changes(before, folding.fold())) == [("state in 2 parts", 3, 2, "SSM")]


def test_states_permuted_in_memory_are_read_where_they_lie():
    built = hybrid_pool()
    conv = built.rows.mamba_pool.mamba_cache.conv[0]
    conv.as_strided_(conv.shape, (conv.stride(0), conv.stride(1), 1, conv.shape[2]))
    folding = Folding(built)
    before = folding.fold()
    conv[1, 4, 5, 0] = 1.0

    assert list(folding.changes(before, folding.fold())) == [("state", 4, 2, "conv 0")]


def test_deepseek_v4_has_a_space_for_each_ratio():
    built = deepseek_v4()
    guarded = adapt_pool(built.pool, built.allocator, built.rows.req_to_token, "all", model="test")
    spaces = {space.name: space for space in guarded.companions}

    assert (guarded.main.name, guarded.slot_count, guarded.table.sources) == ("positions", 256, ())
    assert {name: space.ratio for name, space in spaces.items()} == {"window": 1, "c4": 4, "c128": 128}
    assert all(space.slot_count * space.ratio >= guarded.slot_count for space in spaces.values())
    assert spaces["window"].mapping is built.allocator.full_to_swa_index_mapping
    assert list(list_needs(guarded)) == ["mapping", "ratio", "state"]
    assert list_needs(guarded).keys() <= FOLLOWED


def test_deepseek_v4_keeps_sums_of_a_request_in_its_ring():
    built = deepseek_v4()
    (draft,) = draft_pool(built.pool, built.allocator).states
    sums = built.pool.compress_state_pools[1]
    sums.kv_score_buffer.kv_score.zero_()
    places = sums.translate_from_req_position_to_state_loc(torch.tensor([1]), torch.arange(300, 310))
    sums.kv_score_buffer.kv_score[places] = 1.0
    changed = torch.nonzero(draft.parts[0].rows.flatten(1).any(1)).flatten() // draft.split

    assert draft.row_slots[1] == 1
    assert set(changed.tolist()) == {1}


def test_rows_without_memory_behind_them_are_in_no_source():
    built = mha(4)
    built.pool.post_capture_active, built.pool._post_capture_owner = True, SimpleNamespace(_final_num_tokens=4)
    built.pool.size = built.allocator.size = 4  # as finalize_backing and the allocator's resize leave them
    draft = draft_pool(built.pool, built.allocator)

    assert draft.main.slot_count == 8
    assert {part.rows.shape[0] for part in draft.parts()} == {8}


def test_two_layouts_have_two_fingerprints():
    prints = set()
    for built in (mha(4), mha(4, v_head_dim=6), mla(), mha(4, torch.float8_e4m3fn)):
        prints.add(adapt_pool(built.pool, built.allocator, built.rows.req_to_token, "none", model="m").fingerprint)

    assert len(prints) == 4
