"""Make chain records of the tokens a forward stores: a prefix sum over all of them in one launch.

The chain is a plain sum, so a program needs no word from the programs before it: it adds up the hashes of its request's
earlier tokens again. That leaves nothing to wait for, and pays up to several ten thousand tokens of one request. Where
there are more, another launch adds up tiles of them first: what is done grows with the tokens, not with their square.
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
    find_owner,
    mix,
)
from .violations import ViolationBuffer

MOST_AT_ONCE = 1 << 16  # tokens of a forward up to which one launch does it all
_TILE = 8192
_WRITE_RANGE = tl.constexpr(int(r.Kind.WRITE_RANGE))
_WRITER_ROW_MASK = tl.constexpr(r.WRITER_ROW_MASK)
_WRITER_ROW_BITS = tl.constexpr(r.WRITER_ROW_BITS)


@triton.jit
def _sum_hashes(tokens_ptr, start, until, shift, SIZE: tl.constexpr):
    """Sums, int64 (SIZE,), of the hashes of tokens ``start`` .. ``until - 1``, at positions ``shift`` further."""
    sums = tl.zeros((SIZE,), tl.int64)
    for first in range(start, until, SIZE):
        u = first + tl.arange(0, SIZE)
        token = tl.load(tokens_ptr + u, mask=u < until, other=0) & TOKEN_MASK
        sums += tl.where(u < until, mix(token | ((u + shift) << POSITION_SHIFT)), 0)
    return sums


@jit
def _sum_tiles(
    sums_ptr, tokens_ptr, rows_ptr, prefix_lens_ptr, offsets_ptr, n: tl.int64, bs: tl.int64,
    TILE: tl.constexpr, SIZE: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    request, _, begin, end, first = find_owner(offsets_ptr, rows_ptr, bs, program, TILE, REQUESTS)
    begin = tl.maximum(begin, 0)
    until = tl.minimum(tl.minimum(first + TILE, end), n)
    shift = tl.load(prefix_lens_ptr + request) - begin
    tl.store(sums_ptr + program, tl.sum(_sum_hashes(tokens_ptr, tl.maximum(first, begin), until, shift, SIZE), 0))


@jit
def _write_chain(
    records_ptr, writers_ptr, slots_ptr, tokens_ptr, rows_ptr, prefix_lens_ptr, offsets_ptr, seeds_ptr,
    violations_ptr, violation_count_ptr, n: tl.int64, bs: tl.int64, slot_count: tl.int64, first_slot: tl.int64,
    step_ptr, step: tl.int64, violation_capacity: tl.int64, tile_sums_ptr,
    PARTIAL: tl.constexpr, STEP_LOADED: tl.constexpr, BLOCK: tl.constexpr, EARLIER: tl.constexpr,
    REQUESTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    request, row, begin, end, first = find_owner(
        offsets_ptr, rows_ptr, bs, tl.program_id(0).to(tl.int64), BLOCK, REQUESTS
    )
    begin = tl.maximum(begin, 0)
    t = first + tl.arange(0, BLOCK)
    inside = (t >= begin) & (t < tl.minimum(end, n))
    token = tl.load(tokens_ptr + t, mask=inside, other=0)
    slot = tl.load(slots_ptr + t, mask=inside, other=-1)
    shift = tl.load(prefix_lens_ptr + request) - begin
    seed = tl.load(seeds_ptr + request)

    until = tl.minimum(first, tl.minimum(end, n))
    if TILE > 0:
        tiles = tl.maximum(until - begin, 0) // TILE
        earlier = _sum_hashes(tokens_ptr, begin + tiles * TILE, until, shift, EARLIER)
        place = begin // TILE + request
        for start in range(0, tiles, EARLIER):
            k = start + tl.arange(0, EARLIER)
            known = (k < tiles) & (place + k < n // TILE + bs)
            earlier += tl.load(tile_sums_ptr + place + k, mask=known, other=0)
    else:
        earlier = _sum_hashes(tokens_ptr, begin, until, shift, EARLIER)

    position = t + shift
    word = (token & TOKEN_MASK) | (position << POSITION_SHIFT)
    chain = seed + tl.sum(earlier, 0) + tl.cumsum(tl.where(inside, mix(word), 0), 0)
    word = word | LIVE_BIT

    outside = inside & ((slot < first_slot) | (slot >= slot_count))
    sound = inside & ~outside
    record = records_ptr + slot * RECORD_WORDS
    tl.store(record + CHAIN, chain, mask=sound)
    tl.store(record + IDENTITY, word, mask=sound)
    if STEP_LOADED:
        step = tl.load(step_ptr)
    tl.store(writers_ptr + slot, (row & _WRITER_ROW_MASK) | (step << _WRITER_ROW_BITS), mask=sound)
    if PARTIAL:
        outside = outside & (slot != -1)
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
    step: int | torch.Tensor,
    first_slot: int,
    violations: ViolationBuffer,
    is_partial: bool = False,
    block: int | None = None,
    earlier: int | None = None,
    tile: int | None = None,
    warps: int | None = None,
) -> None:
    """See :func:`write_reference.write_chain`.

    ``step`` may be an int64 tensor (1,) on the device, so that a captured launch serves every step.
    ``block`` and ``earlier`` are powers of two, the tokens that a program writes and those of earlier programs that it
    takes at once; ``tile``, one too, is how many a launch ahead adds up, 0 for no such launch. They and ``warps`` are
    chosen by size if None.
    """
    n, bs = slots.shape[0], rows.shape[0]
    if n == 0:
        return
    if block is None:
        block = 32 if n <= bs else 128 if n <= 16384 else 1024
    if tile is None:
        tile = _TILE if n > MOST_AT_ONCE else 0
    if earlier is None:
        earlier = 32 if n <= bs else 1024 if n <= 16384 or tile else 8192
    requests, sums = block_of(bs, 16, 256), offsets
    if tile:
        # Made anew: it is a few bytes, a forward this long takes seconds, and it must not outlive its stream order.
        sums = offsets.new_empty(n // tile + bs)
        launch(
            _sum_tiles,
            n // tile + bs,
            (sums, tokens, rows, prefix_lens, offsets, n, bs),
            (tile, min(tile, 1024), requests),
            device=records.device,
            warps=warps or 8,
        )
    launch(
        _write_chain,
        n // block + bs,
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
            offsets if isinstance(step, int) else step,
            step if isinstance(step, int) else 0,
            violations.capacity,
            sums,
        ),
        (is_partial, not isinstance(step, int), block, earlier, requests, tile),
        device=records.device,
        warps=warps or (1 if n <= bs else 8),
    )
