"""Every way in which the allocators of the installed SGLang take slots back reaches the guard."""

from types import SimpleNamespace

import pytest
import torch

from kvcanary_plugin.patches.allocators import declare_patches
from kvcanary_plugin.pool_patcher.patch import PatchSet
from kvcanary_plugin.versions import installed_sglang

PAGE = 4


@pytest.fixture
def released():
    """Slots reported so far; None stands for all of them."""
    seen = []

    def release(allocator, slots):
        seen.append(None if slots is None else slots.tolist())

    patches = PatchSet(declare_patches(SimpleNamespace(release=release)))
    patches.install(installed_sglang())
    yield seen
    patches.uninstall()


def make_allocator(page_size):
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    if page_size == 1:
        return TokenToKVPoolAllocator(64, torch.bfloat16, "cpu", None, need_sort=False)
    return PagedTokenToKVPoolAllocator(64, page_size, torch.bfloat16, "cpu", None, need_sort=False)


WAYS = {
    "free": lambda allocator, slots: allocator.free(slots),
    "free_full": lambda allocator, slots: allocator.free_full(slots),
    "free_segment": lambda allocator, slots: allocator.free_segment(slots, start_pos=0),
    "free_segments": lambda allocator, slots: allocator.free_segments([(slots, 0)]),
    "free_full_segment": lambda allocator, slots: allocator.free_full_segment(slots, start_pos=0),
    "free_full_segments": lambda allocator, slots: allocator.free_full_segments([(slots, 0)]),
    "free_page_ids": lambda allocator, slots: allocator.free_page_ids(
        slots[:: allocator.page_size] // allocator.page_size
    ),
}


@pytest.mark.parametrize("in_group", [False, True], ids=["alone", "in-group"])
@pytest.mark.parametrize("page_size", [1, PAGE])
@pytest.mark.parametrize("way", WAYS)
def test_freed_slots_are_reported(released, way, page_size, in_group):
    allocator = make_allocator(page_size)
    if not hasattr(allocator, way):
        pytest.skip(f"SGLang {installed_sglang()} has no {way}")
    released.clear()
    kept, freed = allocator.alloc(2 * PAGE), allocator.alloc(3 * PAGE)
    before = allocator.available_size()
    if in_group:
        allocator.free_group_begin()
    WAYS[way](allocator, freed)
    if in_group:
        allocator.free_group_end()

    assert allocator.available_size() == before + 3 * PAGE
    reported = {slot for slots in released for slot in slots}
    assert reported == set(freed.tolist())
    assert not reported & set(kept.tolist())


@pytest.mark.parametrize("page_size", [1, PAGE])
def test_a_flush_is_reported(released, page_size):
    allocator = make_allocator(page_size)
    released.clear()
    allocator.clear()

    assert released == [None]
