"""Make chain records of the tokens a forward stores: a prefix sum over all of them in one launch.

The chain is a plain sum, so a program needs no word from the programs before it: it adds up the hashes of its request's
earlier tokens again. That leaves nothing to wait for, and pays up to several ten thousand tokens of one request.
"""

from __future__ import annotations

import torch
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

_WRITE_RANGE = tl.constexpr(int(r.Kind.WRITE_RANGE))
_WRITER_ROW_MASK = tl.constexpr(r.WRITER_ROW_MASK)
_WRITER_ROW_BITS = tl.constexpr(r.WRITER_ROW_BITS)


@jit
def _write_chain(
    records_ptr, writers_ptr, slots_ptr, tokens_ptr, rows_ptr, prefix_lens_ptr, offsets_ptr, seeds_ptr,
    violations_ptr, violation_count_ptr, n: tl.int64, bs: tl.int64, slot_count: tl.int64, first_slot: tl.int64,
    step_ptr, step: tl.int64, violation_capacity: tl.int64,
    PARTIAL: tl.constexpr, STEP_LOADED: tl.constexpr, BLOCK: tl.constexpr, EARLIER: tl.constexpr,
    REQUESTS: tl.constexpr,
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

    earlier = tl.zeros((EARLIER,), tl.int64)
    until = tl.minimum(first, tl.minimum(end, n))
    for start in range(begin, until, EARLIER):
        u = start + tl.arange(0, EARLIER)
        before = tl.load(tokens_ptr + u, mask=u < until, other=0) & TOKEN_MASK
        earlier += tl.where(u < until, mix(before | ((u + shift) << POSITION_SHIFT)), 0)

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
    warps: int | None = None,
) -> None:
    """See :func:`write_reference.write_chain`.

    ``step`` may be an int64 tensor (1,) on the device, so that a captured launch serves every step.
    ``block`` and ``earlier`` are powers of two, the tokens that a program writes and those of earlier programs that it
    takes at once; they and ``warps`` are chosen by size if None.
    """
    n, bs = slots.shape[0], rows.shape[0]
    if n == 0:
        return
    if block is None:
        block = 32 if n <= bs else 128 if n <= 16384 else 1024
    if earlier is None:
        earlier = 32 if n <= bs else 1024 if n <= 16384 else 8192
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
        ),
        (is_partial, not isinstance(step, int), block, earlier, block_of(bs, 16, 256)),
        device=records.device,
        warps=warps or (1 if n <= bs else 8),
    )
