"""Check every slot a forward is about to read, straight from the request rows: no list of entries is ever made.

What bounds it is the latency of dependent reads, offsets and row, slot id, record, and then random 32-byte reads. So
a program does as little else as it can: it works for one request, and what is the same for all positions is a scalar.
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
    find_owner,
    mix,
)
from .violations import ViolationBuffer

_NO_WINDOW = 1 << 62
_PART = tl.constexpr(32)
_INT32_MAX = tl.constexpr((1 << 31) - 1)
_LIVE = tl.constexpr(r.LIVE)
_ROW_RANGE = tl.constexpr(int(r.Kind.ROW_RANGE))
_SLOT_RANGE = tl.constexpr(int(r.Kind.SLOT_RANGE))
_DEAD_SLOT = tl.constexpr(int(r.Kind.DEAD_SLOT))
_POSITION = tl.constexpr(int(r.Kind.POSITION))
_LINK = tl.constexpr(int(r.Kind.LINK))
_END_POINT = tl.constexpr(int(r.Kind.END_POINT))


@triton.jit
def _look_up(entries, positions, mask, mapping_ptr, mapped, records_ptr, least, most, MAPPED: tl.constexpr):
    """Slot ids, which of them may be followed, and where their records lie.

    A slot that may not be followed stands as the nearest one that may, and one that ``mask`` leaves out as slot -1.
    """
    slots = tl.load(entries + positions, mask=mask, other=-1)
    if MAPPED:
        slots = tl.load(mapping_ptr + slots, mask=(slots >= 0) & (slots < mapped), other=-1).to(tl.int64)
        slots = tl.minimum(tl.maximum(slots, -1), _INT32_MAX).to(tl.int32)
    safe = tl.minimum(tl.maximum(slots, least), most)
    return slots, safe, records_ptr + safe.to(tl.int64) * RECORD_WORDS


@triton.jit
def _describe(
    entries, start, stop, length, in_row, begin, request, anchor, end_point, mapping_ptr, mapped, least, most,
    records_ptr, writers_ptr, violations_ptr, violation_count_ptr, violation_capacity, MAPPED: tl.constexpr,
):  # fmt: skip
    """Look at positions start .. stop - 1 again, this time to say what is wrong with each.

    This is nearly never needed: it takes few positions at a time, so that it costs the way there no registers.
    """
    for part in range(start, stop, _PART):
        position = part + tl.arange(0, _PART)
        inside = (position < stop) & (position >= begin)
        slot, safe, record = _look_up(
            entries, position, inside & (position < in_row), mapping_ptr, mapped, records_ptr, least, most, MAPPED
        )
        has_before = inside & (position > begin) & (position <= in_row)
        _, _, behind = _look_up(
            entries, position - 1, has_before, mapping_ptr, mapped, records_ptr, least, most, MAPPED
        )
        before = tl.where(position == 0, anchor, tl.load(behind + CHAIN))
        chain = tl.load(record + CHAIN)
        identity = tl.load(record + IDENTITY)
        place_bad = (identity >> POSITION_SHIFT).to(tl.int32) != (position | _LIVE)
        link_bad = (chain - before != mix(identity & MIX_INPUT_MASK)) & ((position != begin) | (begin == 0))
        kind = tl.where(place_bad, tl.where((identity & LIVE_BIT) == 0, _DEAD_SLOT, _POSITION), _LINK)
        kind = tl.where(slot != safe, _SLOT_RANGE, kind)
        digest = tl.load(record + DIGEST)
        locator = tl.load(record + LOCATOR)
        writer = tl.load(writers_ptr + safe)
        append_rows(
            violations_ptr, violation_count_ptr, violation_capacity,
            inside & ((slot != safe) | place_bad | link_bad),
            kind, request, position, slot, identity, chain, digest, locator, 0, 0, writer,
        )  # fmt: skip
        append_rows(
            violations_ptr, violation_count_ptr, violation_capacity,
            inside & (position == length - 1) & (chain != end_point),
            _END_POINT, request, position, slot, identity, chain, digest, locator, 0, 0, writer,
        )  # fmt: skip


@jit
def _verify_prefixes(
    records_ptr, writers_ptr, req_to_token_ptr, rows_ptr, offsets_ptr, anchors_ptr, end_points_ptr,
    violations_ptr, violation_count_ptr, bs: tl.int64, slot_count: tl.int64, first_slot: tl.int64,
    row_count: tl.int64, context: tl.int64, row_stride: tl.int64, violation_capacity: tl.int64,
    mapping_ptr, mapped: tl.int64, window: tl.int64, MAPPED: tl.constexpr,
    BLOCK: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    request, row, begin, end, first = find_owner(
        offsets_ptr, rows_ptr, bs, tl.program_id(0).to(tl.int64), BLOCK, REQUESTS
    )
    anchor = tl.load(anchors_ptr + request)
    end_point = tl.load(end_points_ptr + request)
    start = tl.minimum(first - begin, _INT32_MAX).to(tl.int32)  # past every row where nothing is left to do
    # Of a longer prefix only the window is looked at, the first place of it not for its link.
    opening = tl.maximum(end - begin - window, 0).to(tl.int32)
    length = tl.minimum(end - begin, _INT32_MAX).to(tl.int32)
    in_row = tl.minimum(length, context).to(tl.int32)
    row_bad = (row < 1) | (row >= row_count)
    entries = req_to_token_ptr + row * row_stride
    least = first_slot.to(tl.int32)
    most = (tl.minimum(slot_count, _INT32_MAX) - 1).to(tl.int32)

    lane = tl.arange(0, BLOCK)
    position = start + lane
    inside = (position < length) & (position >= opening) & (~row_bad)
    slot, safe, record = _look_up(
        entries, position, inside & (position < in_row), mapping_ptr, mapped, records_ptr, least, most, MAPPED
    )
    has_seam = (start > opening) & (start < in_row) & (~row_bad)
    _, _, seam = _look_up(entries, start - 1, has_seam, mapping_ptr, mapped, records_ptr, least, most, MAPPED)
    chain = tl.load(record + CHAIN)
    identity = tl.load(record + IDENTITY)
    seam_chain = tl.load(seam + CHAIN, mask=has_seam, other=0)

    before = tl.gather(chain, tl.maximum(lane - 1, 0), 0)
    before = tl.where(lane == 0, tl.where(start == 0, anchor, seam_chain), before)
    sound = (slot == safe) & ((identity >> POSITION_SHIFT).to(tl.int32) == (position | _LIVE))
    is_linked = chain - before == mix(identity & MIX_INPUT_MASK)
    sound = sound & (is_linked | ((position == opening) & (opening > 0)))
    sound = sound & ((position != length - 1) | (chain == end_point))

    if tl.max((inside & ~sound).to(tl.int32), 0) > 0:
        _describe(
            entries, start, tl.minimum(start + BLOCK, length), length, in_row, opening, request, anchor, end_point,
            mapping_ptr, mapped, least, most, records_ptr, writers_ptr, violations_ptr, violation_count_ptr,
            violation_capacity, MAPPED,
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
    mapping: torch.Tensor | None = None,
    window: int | None = None,
    block: int | None = None,
    warps: int = 2,
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
            bs,
            records.shape[0],
            first_slot,
            *req_to_token.shape,
            req_to_token.stride(0),
            violations.capacity,
            rows if mapping is None else mapping,
            0 if mapping is None else mapping.shape[0],
            _NO_WINDOW if window is None else window,
        ),
        (mapping is not None, block, block_of(bs, 16, 256)),
        device=records.device,
        warps=warps,
    )
