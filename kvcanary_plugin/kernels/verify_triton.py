"""Check every slot a forward is about to read, straight from the request rows: no list of entries is ever made.

What bounds it is the latency of a chain of dependent reads: offsets, row, slot id, record. So a record is read whole, by
neighbouring lanes: one 32-byte sector, once. The chain of the position before comes from the neighbour in the block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import record as r
from .launch import block_of, jit, launch
from .mixing_triton import (
    CHAIN,
    DIGEST,
    IDENTITY,
    LIVE_BIT,
    LOCATOR,
    MIX_INPUT_MASK,
    POSITION_SHIFT,
    RECORD_WORDS,
    append_rows,
    find_request,
    mix,
)
from .violations import ViolationBuffer

_LIVE = tl.constexpr(r.LIVE)
_ROW_RANGE = tl.constexpr(int(r.Kind.ROW_RANGE))
_SLOT_RANGE = tl.constexpr(int(r.Kind.SLOT_RANGE))
_DEAD_SLOT = tl.constexpr(int(r.Kind.DEAD_SLOT))
_POSITION = tl.constexpr(int(r.Kind.POSITION))
_LINK = tl.constexpr(int(r.Kind.LINK))
_END_POINT = tl.constexpr(int(r.Kind.END_POINT))


@jit
def _verify_prefixes(
    records_ptr, writers_ptr, req_to_token_ptr, rows_ptr, offsets_ptr, anchors_ptr, end_points_ptr,
    violations_ptr, violation_count_ptr, total: tl.int64, bs: tl.int64, slot_count: tl.int64, first_slot: tl.int64,
    row_count: tl.int64, context: tl.int64, row_stride: tl.int64, violation_capacity: tl.int64,
    BLOCK: tl.constexpr, REQUESTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    last = tl.minimum(first + BLOCK, total) - 1
    lane = tl.arange(0, BLOCK)
    t = first + lane

    # Who owns the block's first and last position. All offsets are looked at, with the rows beside them: one trip to memory.
    low = tl.zeros((), tl.int64)
    high = tl.zeros((), tl.int64)
    row = tl.zeros((), tl.int64)
    for start in range(0, bs, REQUESTS):
        k = start + tl.arange(0, REQUESTS)
        k_begins = tl.load(offsets_ptr + k, mask=k < bs, other=total)
        k_ends = tl.load(offsets_ptr + 1 + k, mask=k < bs, other=total)
        k_rows = tl.load(rows_ptr + k, mask=k < bs, other=0)
        owns_first = (k_begins <= first) & (first < k_ends)
        low += tl.sum(tl.where(owns_first, k, 0), 0)
        row += tl.sum(tl.where(owns_first, k_rows, 0), 0)
        high += tl.sum(tl.where((k_begins <= last) & (last < k_ends), k, 0), 0)
    begins = tl.load(offsets_ptr + low)
    ends = tl.load(offsets_ptr + low + 1)
    # These become one number a lane where the block spans several requests.
    request = low + tl.zeros_like(t)
    begins += tl.zeros_like(t)
    ends += tl.zeros_like(t)
    row += tl.zeros_like(t)
    if low != high:
        request = find_request(offsets_ptr, t, low, high)
        begins = tl.load(offsets_ptr + request)
        ends = tl.load(offsets_ptr + request + 1)
        row = tl.load(rows_ptr + request)
    position = t - begins
    inside = (t < ends) & (position >= 0)
    row_bad = (row < 1) | (row >= row_count)

    # The position before the block's first one, where that belongs to the same request.
    seam = (lane == 0) & (position > 0)
    entry = req_to_token_ptr + row * row_stride + position
    in_row = inside & ~row_bad & (position < context)
    slot = tl.load(entry, mask=in_row, other=-1).to(tl.int64)
    seam_slot = tl.load(entry - 1, mask=in_row & seam, other=0).to(tl.int64)
    slot_bad = (slot < first_slot) | (slot >= slot_count)

    # A slot that may not be followed stands as the nearest one that may.
    safe = tl.minimum(tl.maximum(slot, first_slot), slot_count - 1)
    seam_slot = tl.minimum(tl.maximum(seam_slot, first_slot), slot_count - 1)
    if WIDE:
        column = tl.arange(0, RECORD_WORDS)[None, :]
        record = tl.load(tl.multiple_of(records_ptr + safe[:, None] * RECORD_WORDS, [16, 16]) + column)
        chain = tl.sum(tl.where(column == CHAIN, record, 0), 1)
        identity = tl.sum(tl.where(column == IDENTITY, record, 0), 1)
    else:
        chain = tl.load(records_ptr + safe * RECORD_WORDS + CHAIN)
        identity = tl.load(records_ptr + safe * RECORD_WORDS + IDENTITY)
    seam_chain = tl.load(records_ptr + seam_slot * RECORD_WORDS + CHAIN, mask=in_row & seam, other=0)

    before = tl.gather(chain, tl.maximum(lane - 1, 0), 0)
    before = tl.where(seam, seam_chain, before)
    before = tl.where(position == 0, tl.load(anchors_ptr + request, mask=inside & (position == 0), other=0), before)
    at_end = inside & (t == ends - 1) & ~row_bad
    end_bad = at_end & (chain != tl.load(end_points_ptr + request, mask=at_end, other=0))
    place_bad = (identity >> POSITION_SHIFT) != (position | _LIVE)
    link_bad = chain - before != mix(identity & MIX_INPUT_MASK)
    bad = inside & ~row_bad & (slot_bad | place_bad | link_bad)
    row_bad = inside & row_bad & (position == 0)

    if tl.max((bad | end_bad | row_bad).to(tl.int32), 0) > 0:
        dead = (identity & LIVE_BIT) == 0
        kind = tl.where(place_bad, tl.where(dead, _DEAD_SLOT, _POSITION), _LINK)
        kind = tl.where(slot_bad, _SLOT_RANGE, kind)
        digest = tl.load(records_ptr + safe * RECORD_WORDS + DIGEST)
        locator = tl.load(records_ptr + safe * RECORD_WORDS + LOCATOR)
        writer = tl.load(writers_ptr + safe)
        append_rows(
            violations_ptr, violation_count_ptr, violation_capacity, row_bad,
            _ROW_RANGE, request, 0, row, 0, 0, 0, 0, 0, 0, 0,
        )  # fmt: skip
        append_rows(
            violations_ptr, violation_count_ptr, violation_capacity, bad,
            kind, request, position, slot, identity, chain, digest, locator, 0, 0, writer,
        )  # fmt: skip
        append_rows(
            violations_ptr, violation_count_ptr, violation_capacity, end_bad,
            _END_POINT, request, position, slot, identity, chain, digest, locator, 0, 0, writer,
        )  # fmt: skip


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
    block: int | None = None,
    wide: bool = True,
    warps: int = 4,
) -> None:
    """See :func:`verify_reference.verify_prefixes`. ``block``: positions a program, a power of two."""
    if total == 0:
        return
    bs = rows.shape[0]
    if block is None:
        block = 256
    launch(
        _verify_prefixes,
        triton.cdiv(total, block),
        (
            records,
            writers,
            req_to_token,
            rows,
            offsets,
            anchors,
            end_points,
            violations.rows,
            violations.count,
            total,
            bs,
            records.shape[0],
            first_slot,
            *req_to_token.shape,
            req_to_token.stride(0),
            violations.capacity,
        ),
        (block, block_of(bs, 64, 1024), wide),
        device=records.device,
        warps=warps,
    )
