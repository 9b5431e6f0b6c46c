"""Slots of a companion space, looked up before a forward because the table may change behind it. Torch reference."""

from __future__ import annotations

import torch


def map_slots(*, slots: torch.Tensor, mapping: torch.Tensor, out: torch.Tensor) -> None:
    """``out[i] = mapping[slots[i]]``, and -1 where ``slots[i]`` is no index of it or what stands there is not positive.

    Args:
        slots: int64 (n,).
        mapping: int64 or int32 (m,).
        out: int64 (n,), out.
    """
    inside = (slots >= 0) & (slots < mapping.shape[0])
    found = mapping[torch.where(inside, slots, 0)].to(torch.int64)
    out.copy_(torch.where(inside & (found > 0), found, -1))


def group_slots(*, slots: torch.Tensor, ratio: int, first_slot: int, slot_count: int, out: torch.Tensor) -> None:
    """The slot of the group that each slot completes: ``out[i] = slots[i] // ratio`` where ``slots[i]`` is the last of
    its ``ratio`` slots and within [first_slot, slot_count), and -1 elsewhere.

    Args:
        slots: int64 (n,).
        ratio: slots a group.
        first_slot, slot_count: which slots there are.
        out: int64 (n,), out.
    """
    inside = (slots >= first_slot) & (slots < slot_count)
    out.copy_(torch.where(inside & (slots % ratio == ratio - 1), slots // ratio, -1))
