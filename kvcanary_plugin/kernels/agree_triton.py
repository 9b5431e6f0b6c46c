"""Check that the entries of whole groups of positions are those of the slots a forward reads."""

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
    POSITION_SHIFT,
    RECORD_WORDS,
    append_rows,
    find_owner,
)
from .violations import ViolationBuffer

_LIVE = tl.constexpr(r.LIVE)
_SLOT_RANGE = tl.constexpr(int(r.Kind.SLOT_RANGE))
_DEAD_SLOT = tl.constexpr(int(r.Kind.DEAD_SLOT))
_POSITION = tl.constexpr(int(r.Kind.POSITION))
_LINK = tl.constexpr(int(r.Kind.LINK))


@jit
def _verify_groups(
    records_ptr, writers_ptr, main_ptr, req_to_token_ptr, rows_ptr, offsets_ptr, violations_ptr, violation_count_ptr,
    bs: tl.int64, slot_count: tl.int64, first_slot: tl.int64, main_count: tl.int64, main_first: tl.int64,
    row_count: tl.int64, context: tl.int64, row_stride: tl.int64, violation_capacity: tl.int64,
    RATIO: tl.constexpr, BLOCK: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    request, row, begin, end, first = find_owner(
        offsets_ptr, rows_ptr, bs, tl.program_id(0).to(tl.int64), BLOCK * RATIO, REQUESTS
    )
    readable = (row >= 1) & (row < row_count)
    position = first - begin + tl.arange(0, BLOCK) * RATIO + (RATIO - 1)
    inside = readable & (position < tl.minimum(end - begin, context))
    slot = tl.load(req_to_token_ptr + row * row_stride + position, mask=inside, other=-1).to(tl.int64)
    held = inside & (slot >= main_first) & (slot < main_count)
    wanted = tl.load(main_ptr + slot * RECORD_WORDS + IDENTITY, mask=held, other=0)
    wanted_chain = tl.load(main_ptr + slot * RECORD_WORDS + CHAIN, mask=held, other=0)
    place = position + _LIVE
    held = held & ((wanted >> POSITION_SHIFT) == place)
    entry = tl.where(held, slot // RATIO, -1)
    known = (entry >= first_slot) & (entry < slot_count)
    record = records_ptr + entry * RECORD_WORDS
    identity = tl.load(record + IDENTITY, mask=known, other=0)
    chain = tl.load(record + CHAIN, mask=known, other=0)
    bad = held & ((known == 0) | (identity != wanted) | (chain != wanted_chain))
    if tl.max(bad.to(tl.int32), 0) > 0:
        kind = tl.where((identity >> POSITION_SHIFT) == place, _LINK, _POSITION)
        kind = tl.where((identity & LIVE_BIT) == 0, _DEAD_SLOT, kind)
        kind = tl.where(known, kind, _SLOT_RANGE)
        digest = tl.load(record + DIGEST, mask=known, other=0)
        locator = tl.load(record + LOCATOR, mask=known, other=0)
        writer = tl.load(writers_ptr + entry, mask=known, other=0)
        append_rows(
            violations_ptr, violation_count_ptr, violation_capacity, bad,
            kind, request, position, entry, identity, chain, digest, locator, 0, 0, writer,
        )  # fmt: skip


def verify_groups(
    *,
    records: torch.Tensor,
    writers: torch.Tensor,
    main: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    total: int,
    ratio: int,
    first_slot: int,
    main_first_slot: int,
    violations: ViolationBuffer,
    block: int = 64,
) -> None:
    """See :func:`agree_reference.verify_groups`. ``block``: groups a program, a power of two."""
    if total < ratio:
        return
    bs = rows.shape[0]
    launch(
        _verify_groups,
        total // (block * ratio) + bs,
        (
            records,
            writers,
            main,
            req_to_token,
            rows,
            offsets,
            violations.rows,
            violations.count,
            bs,
            records.shape[0],
            first_slot,
            main.shape[0],
            main_first_slot,
            *req_to_token.shape,
            req_to_token.stride(0),
            violations.capacity,
        ),
        (ratio, block, block_of(bs, 16, 256)),
        device=records.device,
        warps=2,
    )
