"""One launch for the slots of a companion space."""

from __future__ import annotations

import torch
import triton.language as tl

from .launch import jit, launch

_BLOCK = 256


@jit
def _map(slots_ptr, n: tl.int64, mapping_ptr, entries: tl.int64, out_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + i, mask=i < n, other=-1)
    found = tl.load(mapping_ptr + slot, mask=(slot >= 0) & (slot < entries), other=-1).to(tl.int64)
    tl.store(out_ptr + i, tl.where(found > 0, found, -1), mask=i < n)


@jit
def _group(
    slots_ptr, n: tl.int64, ratio: tl.int64, first_slot: tl.int64, slot_count: tl.int64, out_ptr, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + i, mask=i < n, other=-1)
    completes = (slot >= first_slot) & (slot < slot_count) & (slot % ratio == ratio - 1)
    tl.store(out_ptr + i, tl.where(completes, slot // ratio, -1), mask=i < n)


def map_slots(*, slots: torch.Tensor, mapping: torch.Tensor, out: torch.Tensor) -> None:
    """See :func:`map_reference.map_slots`."""
    n = slots.shape[0]
    if n:
        launch(_map, -(-n // _BLOCK), (slots, n, mapping, mapping.shape[0], out), (_BLOCK,), device=slots.device)


def group_slots(*, slots: torch.Tensor, ratio: int, first_slot: int, slot_count: int, out: torch.Tensor) -> None:
    """See :func:`map_reference.group_slots`."""
    n = slots.shape[0]
    if n:
        launch(_group, -(-n // _BLOCK), (slots, n, ratio, first_slot, slot_count, out), (_BLOCK,), device=slots.device)
