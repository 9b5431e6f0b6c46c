"""Make chain records of the tokens a forward stores: a prefix sum over all of them in one launch.

The chain is a plain sum, so a program needs no word from the programs before it: it sums the hashes of its first request's
earlier tokens again. That is cheaper than it sounds, an addition a token, and leaves nothing to wait for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import record as r
from .launch import block_of, jit, launch
from .mixing_triton import (
    CHAIN,
    IDENTITY,
    LIVE_BIT,
    POSITION_SHIFT,
    RECORD_WORDS,
    TOKEN_MASK,
    append_rows,
    find_request,
    mix,
    span_requests,
)
from .violations import ViolationBuffer

_WRITE_RANGE = tl.constexpr(int(r.Kind.WRITE_RANGE))
_WRITER_ROW_MASK = tl.constexpr(r.WRITER_ROW_MASK)
_WRITER_ROW_BITS = tl.constexpr(r.WRITER_ROW_BITS)


@jit
def _write_chain(
    records_ptr, writers_ptr, slots_ptr, tokens_ptr, rows_ptr, prefix_lens_ptr, offsets_ptr, seeds_ptr,
    violations_ptr, violation_count_ptr, n: tl.int64, bs: tl.int64, slot_count: tl.int64, first_slot: tl.int64,
    step: tl.int64, violation_capacity: tl.int64, BLOCK: tl.constexpr, EARLIER: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    t = first + lane
    inside = t < n
    token = tl.load(tokens_ptr + t, mask=inside, other=0)
    slot = tl.load(slots_ptr + t, mask=inside, other=-1)
    low, high = span_requests(offsets_ptr, bs, first, tl.minimum(first + BLOCK, n) - 1, REQUESTS)

    # Tokens of the first request that other programs write.
    earlier = tl.zeros((EARLIER,), tl.int64)
    begin = tl.load(offsets_ptr + low)
    shift = tl.load(prefix_lens_ptr + low) - begin
    for start in range(begin, first, EARLIER):
        u = start + tl.arange(0, EARLIER)
        before = tl.load(tokens_ptr + u, mask=u < first, other=0) & TOKEN_MASK
        earlier += tl.where(u < first, mix(before | ((u + shift) << POSITION_SHIFT)), 0)
    carry = tl.sum(earlier, 0)

    request = find_request(offsets_ptr, t, low, high)
    begins = tl.load(offsets_ptr + request)
    position = t - begins + tl.load(prefix_lens_ptr + request)
    word = (token & TOKEN_MASK) | (position << POSITION_SHIFT)
    sums = tl.cumsum(tl.where(inside, mix(word), 0), 0)
    place = begins - first  # of the request's first token within this block
    before_request = tl.gather(sums, tl.maximum(place - 1, 0).to(tl.int32), 0)
    base = tl.where(place > 0, before_request, tl.where(place < 0, -carry, 0))
    chain = sums - base + tl.load(seeds_ptr + request)
    word = word | LIVE_BIT

    outside = inside & ((slot < first_slot) | (slot >= slot_count))
    sound = inside & ~outside
    record = records_ptr + slot * RECORD_WORDS
    tl.store(record + CHAIN, chain, mask=sound)
    tl.store(record + IDENTITY, word, mask=sound)
    row = tl.load(rows_ptr + request) & _WRITER_ROW_MASK
    tl.store(writers_ptr + slot, row | (step << _WRITER_ROW_BITS), mask=sound)
    if tl.max(outside.to(tl.int32), 0) > 0:
        append_rows(
            violations_ptr, violation_count_ptr, violation_capacity, outside,
            _WRITE_RANGE, request, position, slot, word, chain, 0, 0, 0, 0, 0,
        )  # fmt: skip


def write_chain(
    *,
    records: torch.Tensor,
    writers: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    offsets: torch.Tensor,
    seeds: torch.Tensor,
    step: int,
    first_slot: int,
    violations: ViolationBuffer,
    block: int | None = None,
    earlier: int | None = None,
    warps: int | None = None,
) -> None:
    """See :func:`write_reference.write_chain`. ``block``: tokens a program, a power of two; chosen by size if None."""
    n, bs = slots.shape[0], rows.shape[0]
    if n == 0:
        return
    if block is None:
        block = block_of(n, 64, 512) if n <= 16384 else 2048
    launch(
        _write_chain,
        triton.cdiv(n, block),
        (
            records,
            writers,
            slots,
            tokens,
            rows,
            prefix_lens,
            offsets,
            seeds,
            violations.rows,
            violations.count,
            n,
            bs,
            records.shape[0],
            first_slot,
            step,
            violations.capacity,
        ),
        (block, earlier or (block if n <= block else 4 * block), block_of(bs, 64, 1024)),
        device=records.device,
        warps=warps or 2 if block <= 128 else 4 if block <= 512 else 8,
    )
