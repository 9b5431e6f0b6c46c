"""Check every slot a forward is about to read. The CPU backend, in numpy: see :mod:`.mixing` for why not torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from . import record as r
from .mixing import POSITION_SHIFT, as_array, mix_array_
from .verify_reference import verify_prefixes as verify_and_report
from .violations import ViolationBuffer

Array = npt.NDArray[Any]


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
    mapping: torch.Tensor | None = None,
    window: int | None = None,
) -> None:
    """See :func:`.verify_reference.verify_prefixes`, which also describes what is wrong once something is."""
    if total == 0:
        return
    if mapping is not None or window is not None:
        intact = _is_intact_within(
            as_array(records),
            as_array(req_to_token),
            as_array(rows),
            as_array(offsets),
            as_array(anchors),
            as_array(end_points),
            first_slot,
            None if mapping is None else as_array(mapping),
            window,
        )
        if intact:
            return
    elif _is_intact(
        as_array(records),
        as_array(req_to_token),
        as_array(rows),
        as_array(offsets),
        as_array(anchors),
        as_array(end_points),
        first_slot,
    ):
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
        mapping=mapping,
        window=window,
    )


def _is_intact_within(
    records: Array,
    table: Array,
    rows: Array,
    offsets: Array,
    anchors: Array,
    end_points: Array,
    first_slot: int,
    mapping: Array | None,
    window: int | None,
) -> bool:
    """The same where slots are looked up in a mapping, or only those of a window are looked at."""
    lengths = offsets[1:] - offsets[:-1]
    if (rows.view(np.uint64) - np.uint64(1)).max() >= len(table) - 1 or lengths.max() > table.shape[1]:
        return False
    some = np.flatnonzero(lengths)
    rows, lengths, anchors, end_points = rows[some], lengths[some], anchors[some], end_points[some]
    read = lengths if window is None else np.minimum(lengths, window)
    ends = np.cumsum(read)
    starts, first = ends - read, lengths - read
    positions = np.repeat(first - starts, read) + np.arange(ends[-1])
    slots = table[np.repeat(rows, read), positions]
    if mapping is not None:
        if slots.view(np.uint32).max() >= len(mapping):
            return False
        slots = mapping.take(slots)
    if slots.min() < first_slot or slots.max() >= len(records):
        return False
    found = records.take(slots, axis=0)
    chain, identity = found[:, r.CHAIN], found[:, r.IDENTITY]
    if ((identity >> POSITION_SHIFT) != positions + r.LIVE).any():
        return False
    expected = np.empty(len(slots), dtype=np.int64)
    expected[1:] = chain[:-1]
    expected[starts] = anchors
    words = (identity & r.MIX_INPUT_MASK).view(np.uint64)
    expected += mix_array_(words, np.empty_like(words)).view(np.int64)
    loose = starts[first > 0]
    expected[loose] = chain[loose]
    return bool((expected == chain).all() and (chain[ends - 1] == end_points).all())


def _is_intact(
    records: Array, table: Array, rows: Array, offsets: Array, anchors: Array, end_points: Array, first_slot: int
) -> bool:
    """Whether it is certain that nothing is wrong. Seen as unsigned, a negative id is too large as well."""
    starts, ends = offsets[:-1], offsets[1:]
    lengths = ends - starts
    if not table.flags.c_contiguous:
        return False  # never seen; the reference can do it
    if (rows.view(np.uint64) - np.uint64(1)).max() >= len(table) - 1 or lengths.max() > table.shape[1]:
        return False
    index = np.arange(offsets[-1])
    slots = table.reshape(-1).take((rows * table.shape[1] - starts).repeat(lengths) + index)
    if (slots.view(np.uint32) - np.uint32(first_slot)).max() >= len(records) - first_slot:
        return False
    found = records.take(slots, axis=0)
    chain, identity = found[:, r.CHAIN], found[:, r.IDENTITY]
    place = (r.LIVE - starts).repeat(lengths)
    place += index
    if ((identity >> POSITION_SHIFT) != place).any():
        return False
    expected = np.empty(len(slots), dtype=np.int64)
    expected[1:] = chain[:-1]
    if lengths.min() == 0:
        some = np.flatnonzero(lengths)
        starts, ends, anchors, end_points = starts[some], ends[some], anchors[some], end_points[some]
    expected[starts] = anchors
    words = (identity & r.MIX_INPUT_MASK).view(np.uint64)
    expected += mix_array_(words, np.empty_like(words)).view(np.int64)
    return bool((expected == chain).all() and (chain[ends - 1] == end_points).all())
