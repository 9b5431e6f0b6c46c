"""Check every slot a forward is about to read, straight from the request rows: no list of entries is ever made.

What bounds it is the latency of a chain of dependent reads, offsets, row, slot id, record, so a program does as little else
as it can: it works for one request, and everything that is the same for all of its positions is a scalar.
"""

from __future__ import annotations

import torch
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
    find_owner,
    mix,
)
from .violations import ViolationBuffer

_INT32_MAX = tl.constexpr((1 << 31) - 1)
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
    BLOCK: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    request, row, begin, end, first = find_owner(
        offsets_ptr, rows_ptr, bs, tl.program_id(0).to(tl.int64), BLOCK, REQUESTS
    )
    anchor = tl.load(anchors_ptr + request)
    end_point = tl.load(end_points_ptr + request)
    start = (first - begin).to(tl.int32)
    length = tl.minimum(end - begin, _INT32_MAX).to(tl.int32)
    row_bad = (row < 1) | (row >= row_count)

    lane = tl.arange(0, BLOCK)
    position = start + lane
    inside = (position < length) & (~row_bad)
    in_row = inside & (position < context)
    entries = req_to_token_ptr + row * row_stride
    slot = tl.load(entries + position, mask=in_row, other=-1)
    has_seam = (start > 0) & (start < tl.minimum(length, context)) & (~row_bad)
    seam_slot = tl.load(entries + start - 1, mask=has_seam, other=0)

    # A slot that may not be followed stands as the nearest one that may.
    least = first_slot.to(tl.int32)
    most = (tl.minimum(slot_count, _INT32_MAX) - 1).to(tl.int32)
    safe = tl.minimum(tl.maximum(slot, least), most)
    record = records_ptr + safe.to(tl.int64) * RECORD_WORDS
    chain = tl.load(record + CHAIN)
    identity = tl.load(record + IDENTITY)
    seam_slot = tl.minimum(tl.maximum(seam_slot, least), most).to(tl.int64)
    seam_chain = tl.load(records_ptr + seam_slot * RECORD_WORDS + CHAIN, mask=has_seam, other=0)

    before = tl.gather(chain, tl.maximum(lane - 1, 0), 0)
    before = tl.where(lane == 0, tl.where(start == 0, anchor, seam_chain), before)
    place_bad = (identity >> POSITION_SHIFT).to(tl.int32) != (position | _LIVE)
    link_bad = chain - before != mix(identity & MIX_INPUT_MASK)
    slot_bad = slot != safe
    bad = inside & (slot_bad | place_bad | link_bad)
    end_bad = inside & (position == length - 1) & (chain != end_point)

    if tl.max((bad | end_bad).to(tl.int32), 0) > 0:
        dead = (identity & LIVE_BIT) == 0
        kind = tl.where(place_bad, tl.where(dead, _DEAD_SLOT, _POSITION), _LINK)
        kind = tl.where(slot_bad, _SLOT_RANGE, kind)
        digest = tl.load(record + DIGEST)
        locator = tl.load(record + LOCATOR)
        writer = tl.load(writers_ptr + safe)
        append_rows(
            violations_ptr, violation_count_ptr, violation_capacity, bad,
            kind, request, position, slot, identity, chain, digest, locator, 0, 0, writer,
        )  # fmt: skip
        append_rows(
            violations_ptr, violation_count_ptr, violation_capacity, end_bad,
            _END_POINT, request, position, slot, identity, chain, digest, locator, 0, 0, writer,
        )  # fmt: skip
    if row_bad & (start == 0) & (length > 0):
        append_rows(
            violations_ptr, violation_count_ptr, violation_capacity, row_bad,
            _ROW_RANGE, request, 0, row, 0, 0, 0, 0, 0, 0, 0,
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
        total // block + bs,
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
        (block, block_of(bs, 16, 256)),
        device=records.device,
        warps=warps,
    )
