"""Check every slot a forward is about to read. The CPU backend, in numpy: see :mod:`.mixing` for why not torch."""

from __future__ import annotations

import numpy as np
import torch

from . import record as r
from .mixing import POSITION_SHIFT, as_array, mix_array_
from .verify_reference import verify_prefixes as verify_and_report
from .violations import ViolationBuffer


def verify_prefixes(
    *,
    records: torch.Tensor,
    writers: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    anchors: torch.Tensor,
    end_points: torch.Tensor,
    total: int,
    first_slot: int,
    violations: ViolationBuffer,
) -> None:
    """See :func:`.verify_reference.verify_prefixes`, which also describes what is wrong once something is."""
    if total == 0:
        return
    kept, table, starts = as_array(records), as_array(req_to_token), as_array(offsets)
    request_rows, anchor, end_point = as_array(rows), as_array(anchors), as_array(end_points)
    lengths = starts[1:] - starts[:-1]
    request = np.repeat(np.arange(len(lengths)), lengths)
    index = np.arange(total)
    row_bad = (request_rows < 1) | (request_rows >= len(table))
    if not row_bad.any():
        first = request_rows * (table.strides[0] // table.itemsize) - starts[:-1]
        flat = np.lib.stride_tricks.as_strided(
            table, (len(table) * table.strides[0] // table.itemsize,), table.strides[1:]
        )
        slots = flat[first[request] + index]
        inside = np.clip(slots, first_slot, len(kept) - 1)
        found = kept.take(inside, axis=0)
        chain, identity = found[:, r.CHAIN], found[:, r.IDENTITY]
        before = np.empty(total, dtype=np.int64)
        before[1:] = chain[:-1]
        nonempty = np.flatnonzero(lengths)
        before[starts[:-1][nonempty]] = anchor[nonempty]
        place = (r.LIVE - starts[:-1])[request] + index
        words = (identity & r.MIX_INPUT_MASK).view(np.uint64)
        mixed = mix_array_(words, np.empty_like(words)).view(np.int64)
        bad = slots != inside
        bad |= (identity >> POSITION_SHIFT) != place
        mixed += before
        bad |= mixed != chain
        ends = starts[1:][nonempty] - 1
        if not bad.any() and np.array_equal(chain[ends], end_point[nonempty]):
            return
    verify_and_report(
        records=records,
        writers=writers,
        req_to_token=req_to_token,
        rows=rows,
        offsets=offsets,
        anchors=anchors,
        end_points=end_points,
        total=total,
        first_slot=first_slot,
        violations=violations,
    )
