"""Poison the edges of rows: one program a slot. What bounds it is one random sector an edge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .launch import block_of, jit, launch
from .mixing_triton import mix
from .pointers import offset_of, pointers_of
from .poison_reference import FINITE_MASK, POISON_SEED, SOURCE_SHIFT

if TYPE_CHECKING:
    from ..pool_patcher.sources import SourceTable

_SEED = tl.constexpr(POISON_SEED)
_SHIFT = tl.constexpr(SOURCE_SHIFT)
_FINITE = tl.constexpr(FINITE_MASK)
_PLACE_WORDS = tl.constexpr(2)


@triton.jit
def poison_of(slot, source):
    """See :func:`poison_reference.poison_words`."""
    return mix((source << _SHIFT) + slot + _SEED) & _FINITE


@triton.jit
def _store_word(address, word, mask, UNIT: tl.constexpr):
    """Store an int64 at byte addresses that are multiples of UNIT, in pieces of at most 8 bytes."""
    if UNIT >= 8:
        tl.store(address.to(tl.pointer_type(tl.int64)), word, mask=mask)
    else:
        for piece in tl.static_range(8 // UNIT):
            part = word >> (piece * UNIT * 8)
            if UNIT == 4:
                tl.store(address.to(tl.pointer_type(tl.int32)) + piece, part.to(tl.int32), mask=mask)
            elif UNIT == 2:
                tl.store(address.to(tl.pointer_type(tl.int16)) + piece, part.to(tl.int16), mask=mask)
            else:
                tl.store(address.to(tl.pointer_type(tl.int8)) + piece, part.to(tl.int8), mask=mask)


@jit
def _poison(
    places_ptr, sources: tl.int64, page_stride: tl.int64, slot_stride: tl.int64, slots_ptr, slot_count: tl.int64,
    chosen_ptr, WHOLE_WORDS: tl.constexpr, PAGE_SIZE: tl.constexpr, GROUP_SIZE: tl.constexpr,
    GROUP_STRIDE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots_ptr + tl.program_id(0).to(tl.int64))
    wanted = (slot >= 0) & (slot < slot_count)
    offset = offset_of(slot, page_stride, slot_stride, PAGE_SIZE, GROUP_SIZE, GROUP_STRIDE)
    for begin in range(0, sources, ROWS):
        source = begin + tl.arange(0, ROWS)
        inside = (source < sources) & wanted
        place = places_ptr + source * _PLACE_WORDS
        row = tl.load(place, mask=inside, other=0) + offset
        index = tl.load(place + 1, mask=inside, other=0)
        inside = inside & (tl.load(chosen_ptr + index, mask=inside, other=0) != 0)
        word = poison_of(slot, index)
        _store_word(row, word, inside, UNIT)
        if WHOLE_WORDS > 1:
            _store_word(row + (WHOLE_WORDS - 1) * 8, word, inside, UNIT)


def poison_slots(*, table: SourceTable, slots: torch.Tensor, chosen: torch.Tensor) -> None:
    """See :func:`poison_reference.poison_slots`."""
    n = slots.shape[0]
    if n == 0:
        return
    for group in pointers_of(table).groups:
        whole_words = group.read_bytes // 8
        if whole_words == 0:
            continue
        launch(
            _poison,
            n,
            (
                group.places,
                group.count,
                group.page_stride,
                group.slot_stride,
                slots,
                table.slot_count,
                chosen,
            ),
            (
                whole_words,
                group.page_size,
                group.group_size,
                group.group_stride,
                group.unit,
                block_of(group.count, 1, 128),
            ),
            device=slots.device,
            warps=1,
        )
