"""Move records from slots to other slots that may be among them. Torch reference."""

from __future__ import annotations

import torch

from . import record as r

MOVED_WORDS = r.RECORD_WORDS + 1  # a record and its writer stamp


def move_records(
    *,
    records: torch.Tensor,
    writers: torch.Tensor,
    target: torch.Tensor,
    source: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Copy records and writer stamps of ``source`` to ``target``. All are read before any is written.

    Args:
        records: int64 (slot_count, RECORD_WORDS), updated at ``target``.
        writers: int64 (slot_count,), updated at ``target``.
        target, source: int64 (n,). A pair with an id outside [1, slot_count) is left out. No target twice.
        scratch: int64 (n * MOVED_WORDS or more,), overwritten.
    """
    count = records.shape[0]
    sound = (target >= 1) & (target < count) & (source >= 1) & (source < count)
    to, of = target[sound], source[sound]
    records[to], writers[to] = records[of], writers[of]
